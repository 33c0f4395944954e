"""The keeper's side of its prepared worker (see runner): a process that waits to run tests, and the runs that wait.

Runs are made one after another. A worker that dies, lies or takes too long costs its run and is replaced by a fork.
"""

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import pytests, runner
from .files import Answer
from .frames import Garbage, Reader, pack


class Worker:
    """root: the workspace; leave, become: what makes a fork of the keeper the tools' own; answer: sends a result."""

    def __init__(
        self,
        root: str,
        environment: dict[str, str],
        leave: Callable[[], None],
        become: Callable[[], None],
        answer: Callable[[int, Answer], None],
    ) -> None:
        self._root = root
        self._environment = environment
        self._leave = leave
        self._become = become
        self._answer = answer
        self._channel: socket.socket | None = None
        self._pid = 0
        self._reader = Reader()
        self.runs: deque[tuple[int, dict[str, Any]]] = deque()
        """Asked for and not answered, the one under way first."""
        self.deadline = 0.0
        """Of the run under way."""

    def prepare(self) -> None:
        """Fork the process that the first run will find waiting."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._leave()
                ours.close()
                null = os.open("/dev/null", os.O_RDWR)
                for fd in range(3):
                    os.dup2(null, fd)
                self._become()
                os.chdir(self._root)
                os.environ.clear()
                os.environ.update(self._environment)
                runner.serve(theirs, self._root)
            finally:
                os._exit(0)
        theirs.close()
        self._channel, self._pid, self._reader = ours, pid, Reader()

    def close(self) -> None:
        """In a fork of the keeper: let go of the channel."""
        if self._channel is not None:
            self._channel.close()

    def fileno(self) -> int:
        """What to wait for while runs wait; -1 when there is nothing."""
        return self._channel.fileno() if self.runs and self._channel is not None else -1

    def died(self, pid: int) -> None:
        """A child of the keeper was reaped."""
        if pid == self._pid:
            self._pid = 0

    def run(self, number: int, header: dict[str, Any]) -> None:
        """Run the header's paths with its seed when all before it are done, and answer the call of that number."""
        self.runs.append((number, header))
        if len(self.runs) == 1:
            self._next()

    def expire(self, now: float) -> None:
        """Give up a run that is past its limit."""
        if self.runs and now >= self.deadline:
            limit = self.runs[0][1]["timeout_s"]
            self._failed({"timed_out": True, "error": f"the tests ran past their limit of {limit:g} s"})

    def ready(self) -> None:
        """Take what has come."""
        assert self._channel is not None
        data = self._channel.recv(65536)
        try:
            frames = self._reader.feed(data)
            if not frames:
                if not data:
                    self._failed({"error": "the code under test ended the test process"})
                return
            header, bodies = frames[0]
            tests = pytests.rows(header["tests"])
            truncated = bool(header["truncated"])
            output = bodies[0]
        except (Garbage, KeyError, IndexError, TypeError, ValueError):
            self._failed({"error": "the code under test broke the test process"})
            return
        number, _ = self.runs.popleft()
        self._answer(number, (pytests.verdict(tests) | {"truncated": truncated, "stdout": 0}, [output]))
        if self.runs:
            self._next()

    def rests(self) -> bool:
        """Whether it waits for its next run, alone and with nothing of its own."""
        if self._channel is None:
            return True
        try:
            fields = _small(f"/proc/{self._pid}/stat").rpartition(b")")[2].split()
            children = _small(f"/proc/{self._pid}/task/{self._pid}/children")
        except OSError:
            return False
        return fields[0] == b"S" and fields[17] == b"1" and not children

    def drop(self) -> None:
        """End the process; the next run gets another."""
        if self._channel is not None:
            self._channel.close()
            if self._pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
            self._channel, self._pid = None, 0

    def _next(self) -> None:
        if self._channel is not None and select.select([self._channel], [], [], 0)[0]:
            self.drop()
        if self._channel is None:
            self.prepare()
        header = self.runs[0][1]
        self.deadline = time.monotonic() + header["timeout_s"]
        assert self._channel is not None
        try:
            self._channel.sendall(pack({"paths": header["paths"], "seed": header["seed"]}))
        except OSError:
            self._failed({"error": "the test worker was gone"})

    def _failed(self, header: dict[str, Any]) -> None:
        number, _ = self.runs.popleft()
        self.drop()
        self._answer(number, ({"ok": False, "code": 1} | header, []))
        if self.runs:
            self._next()


def _small(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
