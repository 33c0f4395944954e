"""Starts the processes of a trainer's group on this machine, watches them, and ends them with their starter.

Each is `python -m headrace.training.parallel.rank` with torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT). Its standard input is a pipe from the starter: the configuration comes through it, and the
end of the pipe means that the starter is gone. So no process outlives it, however it ends.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from headrace.config import Config
from headrace.python_modules import module_command

STOP_S = 20.0
"""Seconds that a process may take to end after the order to stop."""
_TAIL = 400


class Hello(msgspec.Struct, frozen=True):
    """The first line of a process's standard input."""

    config: Config
    folder: str
    """The trainer's folder in node 0."""

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.config.trainer.ranks // self.config.trainer.nodes


class Store(NamedTuple):
    """The address of the group's store."""

    host: str
    port: int


class Ending:
    """The first reason for which a group has ended."""

    def __init__(self) -> None:
        self.why = ""
        """Empty while the group runs, and after a stop in order."""
        self.begun = threading.Event()
        self._lock = threading.Lock()

    def begin(self, why: str = "") -> bool:
        """Begin to end. False when that has begun already; its reason is then kept."""
        with self._lock:
            if self.begun.is_set():
                return False
            self.why = why
            self.begun.set()  # after the text, which its waiters read
            return True


class LocalRanks:
    """Processes of one machine."""

    def __init__(self, numbers: range, hello: Hello, store: Store, failed: Callable[[str], None]) -> None:
        """Start the processes with these ranks. failed: gets a text about each one that has ended, and its exit."""
        self._failed = failed
        line = msgspec.json.encode(hello) + b"\n"
        self._logs = [tempfile.TemporaryFile() for _ in numbers]
        self.processes = [
            self._start(rank, hello, line, store, log) for rank, log in zip(numbers, self._logs, strict=True)
        ]
        self._watchers = [
            threading.Thread(target=self._watch, args=(index, rank), name=f"rank {rank}", daemon=True)
            for index, rank in enumerate(numbers)
        ]
        for watcher in self._watchers:
            watcher.start()

    def _start(self, rank: int, hello: Hello, line: bytes, store: Store, log: object) -> "subprocess.Popen[bytes]":
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank % hello.per_node,
            "WORLD_SIZE": hello.config.trainer.ranks,
            "MASTER_ADDR": store.host,
            "MASTER_PORT": store.port,
        }
        process = subprocess.Popen(  # type: ignore[call-overload]
            module_command("headrace.training.parallel.rank"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._failed(f"rank {rank} (process {process.pid}) {how}{self._last_words(index)}")

    def _last_words(self, index: int) -> str:
        log = self._logs[index]
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:_TAIL]}" if lines else ""

    def kill(self) -> None:
        """Kill all processes that run."""
        for process in self.processes:
            process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Return when all processes have ended. seconds: kill those that take longer."""
        for process in self.processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Free threads and files, after `wait`."""
        for watcher in self._watchers:
            watcher.join()
        for process in self.processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for log in self._logs:
            log.close()
