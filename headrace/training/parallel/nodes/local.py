"""Starts the processes of a trainer's group on this machine, watches them, and ends them with their starter.

Each is `python -m headrace.training.parallel.rank` with torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT). Its standard input is a pipe from the starter: the configuration comes through it, then the
names from outside that the starter has admitted (headrace/registry.py), and the end of the pipe means that the starter
is gone. So no process outlives it, however it ends. Its output goes to a log file of its own (`nodes.logs`). A process
that a signal stops and that nobody continues is killed, as `headrace up` does with its children.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config import Config
from headrace.process_stat import LOOK_S, STOPPED_S, Stops, stopped_too_long
from headrace.python_modules import module_command
from headrace.registry import admitted
from headrace.training.device import TrainerError
from headrace.training.parallel.interface import Loss
from headrace.training.parallel.nodes.logs import RankLog

STOP_S = 6.0
"""Seconds that the processes may take to end after the order to stop: less than the 10 s of an actor's stop."""
POLL_S = 0.05
RAISED = 4
"""Exit code of a rank in which a step raised. The last line of its log is the exception."""
DUMP = signal.SIGUSR1
"""The signal at which a rank writes the stacks of all its threads to its log."""


class Hello(msgspec.Struct, frozen=True):
    """The first line of a process's standard input."""

    config: Config
    folder: str
    """The trainer's folder in node 0."""


class Store(NamedTuple):
    """The address of the group's store."""

    host: str
    port: int


class Ending:
    """The first reason for which a group has ended."""

    def __init__(self) -> None:
        self.loss = Loss("")
        """Its text is empty while the group runs, and after a stop in order."""
        self.begun = threading.Event()
        self._lock = threading.Lock()

    def begin(self, loss: Loss) -> bool:
        """Begin to end, without a text in order. False when that has begun already; its reason is then kept."""
        with self._lock:
            if self.begun.is_set():
                return False
            self.loss = loss
            self.begun.set()  # after the text, which its waiters read
            return True


class LocalRanks:
    """Processes of one machine."""

    def __init__(self, numbers: range, hello: Hello, store: Store, failed: Callable[[Loss], None], logs: Path) -> None:
        """Start the processes with these ranks. failed: gets each one that has ended, and its exit. logs: folder of
        their logs. TrainerError when that cannot be written."""
        self._failed, self._numbers = failed, numbers
        # What this machine's configuration admits, not what node 0 says.
        line = msgspec.json.encode(hello) + b"\n" + msgspec.json.encode(admitted()) + b"\n"
        try:
            self._logs = [RankLog(logs, rank) for rank in numbers]
        except OSError as error:
            raise TrainerError(f"the logs of the trainer's ranks: {error}") from None
        self.processes = [
            self._start(rank, hello, line, store, log.file) for rank, log in zip(numbers, self._logs, strict=True)
        ]
        self._ended = threading.Event()
        self._watchers = [
            threading.Thread(target=self._watch, args=(index, rank), name=f"rank {rank}", daemon=True)
            for index, rank in enumerate(numbers)
        ]
        self._watchers.append(threading.Thread(target=self._look, name="stopped ranks", daemon=True))
        for watcher in self._watchers:
            watcher.start()

    def _start(self, rank: int, hello: Hello, line: bytes, store: Store, log: object) -> "subprocess.Popen[bytes]":
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank % hello.config.trainer.machine_ranks,
            "WORLD_SIZE": hello.config.trainer.ranks,
            "MASTER_ADDR": store.host,
            "MASTER_PORT": store.port,
        }
        process = subprocess.Popen(  # type: ignore[call-overload]
            module_command("headrace.training.parallel.rank"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                **{name: str(value) for name, value in places.items()},
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
            },
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; its watcher reports how
            process.stdin.write(line)
            process.stdin.flush()
        return process  # type: ignore[no-any-return]

    def _watch(self, index: int, rank: int) -> None:
        process = self.processes[index]
        code = process.wait()
        log = self._logs[index]
        words = log.last_words()
        if code == RAISED:
            how = "raised in a step"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        how += f": {words}" if words else ""
        raised = f"rank {rank}: {words}" if code == RAISED else ""
        text = f"rank {rank} (process {process.pid}) {how} (log: {log.path})"
        self._failed(Loss(text, f"rank {rank} {how}", raised))

    def _look(self) -> None:
        """Kill a process that a signal has stopped for long; its watcher then tells its end."""
        stops = [Stops() for _ in self.processes]
        while not self._ended.wait(LOOK_S):
            for rank, process, stop in zip(self._numbers, self.processes, stops, strict=True):
                if stop.seconds(process.pid, LOOK_S) >= STOPPED_S:
                    text = f"rank {rank}: {stopped_too_long(process.pid)}"
                    self._failed(Loss(text, f"rank {rank} was stopped by a signal"))
                    process.kill()

    def stopped(self) -> list[int]:
        """The ranks that a signal has stopped at this moment."""
        states = ((rank, Stops.state(process.pid)) for rank, process in zip(self._numbers, self.processes, strict=True))
        return [rank for rank, state in states if state == "T"]

    def dump(self) -> None:
        """Let every process write the stacks of its threads to its log."""
        for process in self.processes:
            process.send_signal(DUMP)

    def kill(self) -> None:
        """Kill all processes that run."""
        for process in self.processes:
            process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Return when all processes have ended. seconds: the time after an order to stop. They are killed after it, and
        as soon as one ends otherwise than in order: the others may wait for it, and never hear the order."""
        if seconds is not None:
            deadline = time.monotonic() + seconds
            while None in (codes := [process.poll() for process in self.processes]):
                if any(codes) or time.monotonic() > deadline:
                    self.kill()
                    break
                time.sleep(POLL_S)
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Free threads and files, after `wait`."""
        self._ended.set()
        for watcher in self._watchers:
            watcher.join()
        for process in self.processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for log in self._logs:
            log.close()
