"""Starts the other processes of a trainer's group, watches them, and ends them with the first process.

Each is `python -m headrace.training.parallel.rank` with torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT). Its standard input is a pipe from the first process: the configuration comes through it, and
its end means that the first process is gone. So no process outlives the actor, however the actor ends. When one of them
ends, a thread kills the rest: the collective in which the first process waits then raises an error.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.config import Config
from headrace.python_modules import module_command
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError

STOP_S = 20.0
"""Seconds that a process may take to end after the order to stop."""
GRACE_S = 5.0
"""Seconds to wait after a broken connection until a process ends, because that end is the cause to report."""
POLL_S = 0.05
_TAIL = 400


class Hello(msgspec.Struct, frozen=True):
    """The first line of a process's standard input."""

    config: Config
    folder: str


class Ranks:
    """All processes of a group except the first, on this machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Start the processes. Each joins the group once it has started."""
        size = config.trainer.ranks
        self.store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=group.PATIENCE)
        hello = msgspec.json.encode(Hello(config, str(folder.resolve()))) + b"\n"
        self.why = ""
        """A text about the first process that ended, and its exit; empty while all run."""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._logs = [tempfile.TemporaryFile() for _ in range(1, size)]
        self.processes = [self._start(rank, size, hello) for rank in range(1, size)]
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(1, size)
        ]
        for watcher in self._watchers:
            watcher.start()

    def wait(self) -> None:
        """Return when all processes are about to join the group. GroupError when one ends before.

        The first process calls it before it joins, because nothing ends its wait for a process that never comes.
        """
        while not self.store.check([_place(rank) for rank in range(1, len(self.processes) + 1)]):
            if self._ending.wait(POLL_S):
                raise GroupError(self.why)

    def _start(self, rank: int, size: int, hello: bytes) -> "subprocess.Popen[bytes]":
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": self.store.port}
        process = subprocess.Popen(
            module_command("headrace.training.parallel.rank"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._logs[rank - 1],
            start_new_session=True,
            env={
                **os.environ,
                **{name: str(value) for name, value in places.items()},
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
            },
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; its watcher reports how
            process.stdin.write(hello)
            process.stdin.flush()
        return process

    def _watch(self, rank: int) -> None:
        code = self.processes[rank - 1].wait()
        with self._lock:
            if self._ending.is_set():
                return
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self.why = f"rank {rank} (process {self.processes[rank - 1].pid}) {how}{self._last_words(rank)}"
            self._ending.set()  # after the text, which its waiters read
            self._kill()

    def _last_words(self, rank: int) -> str:
        log = self._logs[rank - 1]
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:_TAIL]}" if lines else ""

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def cause(self) -> str:
        """After a broken connection: the text about the process that ended first; empty when none did."""
        self._ending.wait(GRACE_S)
        return self.why

    def end(self, settle: Callable[[], None] = lambda: None) -> str:
        """Kill the group. Returns as `cause`. settle: called before the group's connections are closed; ends threads
        that use them."""
        self.cause()
        with self._lock:
            self._ending.set()
            self._kill()
        for process in self.processes:
            process.wait()
        settle()
        self._close()
        return self.why

    def stop(self, tell: Callable[[], None]) -> None:
        """End the group after the order to stop, which `tell` sends; kill processes that take longer than STOP_S."""
        with self._lock:
            ended = self._ending.is_set()
            self._ending.set()
        if not ended:
            with suppress(RuntimeError):
                tell()
        for process in self.processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._close()

    def _close(self) -> None:
        for watcher in self._watchers:
            watcher.join()
        for process in self.processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for log in self._logs:
            log.close()
        group.leave()


def announce() -> None:
    """Say to the first process that this one is about to join the group."""
    place = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    place.set(_place(int(os.environ["RANK"])), "")


def _place(rank: int) -> str:
    return f"arrived/{rank}"


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank on this machine: a CUDA device of its own, or the CPU."""
    return torch.device("cuda", rank) if device.type == "cuda" else device
