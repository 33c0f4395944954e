"""The agent's side of the test worker: the prepared process that runs tests (see process.py), and the queue of runs.

Runs are executed one after another. If the process dies, breaks the protocol or exceeds the time limit, its run fails
and a new process is forked for the next one.
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

from .. import jobs
from ..files import Answer
from ..frames import Garbage, Reader, pack
from . import process, pytests


class Worker:
    """One test process at a time, and the runs that wait for it."""

    def __init__(
        self,
        root: str,
        environment: dict[str, str],
        close_own: Callable[[], None],
        become: Callable[[], None],
        answer: Callable[[int, Answer], None],
        end_processes: Callable[[], None],
        exhausted: Callable[[], bool],
    ) -> None:
        """root: the workspace; environment: of the process; close_own: closes the agent's descriptors in a fork;
        become: turns a fork into the tools' user; answer: sends the result of a call; end_processes: ends every process
        of the slot, called when its process limit is reached; exhausted: whether a fork or memory was refused."""
        self._root = root
        self._environment = environment
        self._close_own = close_own
        self._become = become
        self._answer = answer
        self._end_processes = end_processes
        self._exhausted = exhausted
        self._channel: socket.socket | None = None
        self._pid = 0
        self._reader = Reader()
        self.runs: deque[tuple[int, dict[str, Any]]] = deque()
        """Runs that are not answered yet: (call number, header), the running one first."""
        self.deadline = 0.0
        """Of the running one, on the monotonic clock."""

    def prepare(self) -> None:
        """Fork the process, so that the next run finds it ready. ProcessLimit."""
        ours, theirs = socket.socketpair()
        try:
            pid = jobs.fork()
        except jobs.ProcessLimit:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                os.setsid()
                jobs.accept_interrupts()
                self._close_own()
                ours.close()
                null = os.open("/dev/null", os.O_RDWR)
                for fd in range(3):
                    os.dup2(null, fd)
                self._become()
                os.chdir(self._root)
                os.environ.clear()
                os.environ.update(self._environment)
                process.serve(theirs, self._root)
            finally:
                os._exit(0)
        theirs.close()
        self._channel, self._pid, self._reader = ours, pid, Reader()

    def close(self) -> None:
        """In a fork of the agent: close the channel."""
        if self._channel is not None:
            self._channel.close()

    def fileno(self) -> int:
        """The descriptor to poll while a run is under way; -1 when none is."""
        return self._channel.fileno() if self.runs and self._channel is not None else -1

    def died(self, pid: int) -> None:
        """Note that a child of the agent was reaped."""
        if pid == self._pid:
            self._pid = 0

    def run(self, number: int, header: dict[str, Any]) -> None:
        """Queue a run of the header's paths with its seed; the result answers call `number`."""
        self.runs.append((number, header))
        if len(self.runs) == 1:
            self._next()

    def expire(self, now: float) -> None:
        """Fail the run under way if it is past its limit."""
        if self.runs and now >= self.deadline:
            limit = self.runs[0][1]["timeout_s"]
            self._failed({"timed_out": True, "error": f"the tests ran past their limit of {limit:g} s"})

    def ready(self) -> None:
        """Read what the process sent, and answer the run when its report is complete."""
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

    def idle(self) -> bool:
        """Whether the process waits for its next run, with one thread and no children."""
        if self._channel is None:
            return True
        try:
            fields = _read(f"/proc/{self._pid}/stat").rpartition(b")")[2].split()
            children = _read(f"/proc/{self._pid}/task/{self._pid}/children")
        except OSError:
            return False
        return fields[0] == b"S" and fields[17] == b"1" and not children

    def drop(self) -> None:
        """End the process; the next run forks another one."""
        if self._channel is not None:
            self._channel.close()
            if self._pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
            self._channel, self._pid = None, 0

    def end(self, reason: str) -> None:
        """End the process; a run under way fails with the reason."""
        if self.runs:
            self._failed({"error": reason})
        else:
            self.drop()

    def _next(self) -> None:
        if self._channel is not None and select.select([self._channel], [], [], 0)[0]:
            self.drop()
        if self._channel is None:
            try:
                self.prepare()
            except jobs.ProcessLimit:
                self._end_processes()
                self._failed({"error": "the sandbox's process limit was reached, so the tests could not start"})
                return
        header = self.runs[0][1]
        self.deadline = time.monotonic() + header["timeout_s"]
        assert self._channel is not None
        try:
            self._channel.sendall(pack({"paths": header["paths"], "seed": header["seed"]}))
        except OSError:
            self._failed({"error": "the test process had ended before the run"})

    def _failed(self, header: dict[str, Any]) -> None:
        number, _ = self.runs.popleft()
        self.drop()
        if self._exhausted():
            # The tests left processes in other sessions, and those would starve every later call.
            self._end_processes()
        self._answer(number, ({"ok": False, "code": 1} | header, []))
        if self.runs:
            self._next()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
