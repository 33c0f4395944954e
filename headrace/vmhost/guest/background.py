"""Jobs that outlive the call that started them: later calls follow, feed and end them; a terminal is optional.

A job's output waits for the call that follows it, up to a cap. At the cap the agent stops reading, so the job blocks
in its next write. No output is lost, memory stays bounded, and a job that no call follows is blocked.
"""

import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import jobs
from .files import Answer
from .walks import OperationError

WITHOUT_LIMIT_S = 1e9
REMEMBERED = 64
"""Ended jobs whose outcome can still be asked for."""
LARGEST_INPUT = 1 << 20
Send = Callable[[int, Answer], None]


class Job(jobs.Job):
    """A job whose output is taken in pieces and whose input may continue."""

    follower: tuple[int, float, int, bool] | None = None
    """The call that follows it: its number, the end of its wait, the largest number of bytes that it takes, and whether
    it takes them as they are."""
    over = False
    keep_open = False
    terminal = -1

    def fds(self) -> list[tuple[int, bool]]:
        """Descriptors to poll. A stream at its cap is left out, so its writer waits."""
        reading = [(fd, False) for fd, name in self.streams.items() if self._capacity(name) > 0]
        return [*reading, (self.stdin, True)] if self.stdin >= 0 and self._unwritten else reading

    def _capacity(self, name: str) -> int:
        spare = 0 if self.status is None else 1 << 20  # an ended job left less than this in its pipes
        return self.cap + spare - len(self.output[name])

    def ready(self, fd: int) -> None:
        """Read or write what is possible, never more than the cap allows."""
        if fd == self.stdin:
            self._write()
            return
        name = self.streams[fd]
        capacity = self._capacity(name)
        if capacity <= 0:
            return
        try:
            data = os.read(fd, min(65536, capacity))
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other side is closed
            data = b""
        if not data:
            del self.streams[fd]
            os.close(fd)
        self.output[name] += data

    def feed(self, data: bytes, last: bool) -> None:
        """Add input. OperationError when the job's input is closed or the job does not read it."""
        if self.stdin < 0:
            raise OperationError("the job's input is closed")
        if len(self._unwritten) + len(data) > LARGEST_INPUT:
            raise OperationError(f"the job does not read its input: {LARGEST_INPUT >> 20} MiB of it waits already")
        self._unwritten += data + (b"\x04" if last and self.terminal >= 0 else b"")
        self.keep_open = not last
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            try:
                self._unwritten = self._unwritten[os.write(self.stdin, self._unwritten) :]
            except BlockingIOError:
                return
            except OSError:
                self._unwritten, self.keep_open = b"", False
        if not self.keep_open and self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def take(self, limit: int) -> tuple[bytes, bytes]:
        """Remove and return the next piece of stdout and of stderr, at most `limit` bytes each."""
        pieces = []
        for name in ("stdout", "stderr"):
            waiting = self.output.get(name, bytearray())
            pieces.append(bytes(waiting[:limit]))
            del waiting[:limit]
        return pieces[0], pieces[1]

    def foreground(self) -> int:
        """The foreground process group of the job's terminal; 0 where there is none."""
        try:
            return os.tcgetpgrp(self.terminal) if self.terminal in self.streams else 0
        except OSError:
            return 0

    @property
    def empty(self) -> bool:
        """Whether all of its output was taken."""
        return not any(self.output.values())


class Background:
    """All background jobs of a slot. It answers calls through `send` and forks nothing itself."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.jobs: dict[int, Job] = {}

    def ensure_capacity(self) -> None:
        """Forget the oldest ended job if the list is full. OperationError when all of its jobs still run."""
        if len(self.jobs) >= REMEMBERED:
            ended = next((number for number, job in self.jobs.items() if job.over), None)
            if ended is None:
                raise OperationError(f"{REMEMBERED} jobs run already; stop one first")
            del self.jobs[ended]

    def add(self, number: int, job: Job) -> Answer:
        """Register a job that was just forked; its number is that of the call that started it."""
        self.jobs[number] = job
        job.done = lambda _: self._ended(number)
        return {"job": number, "running": True}, []

    def follow(self, number: int, header: dict[str, Any]) -> None:
        """Answer call `number` with the job's next output, now or when there is some."""
        job = self._find(header["job"])
        if job.follower is not None:
            self._send(job.follower[0], ({"ok": False, "error": "another call follows this job now"}, []))
        job.follower = number, time.monotonic() + header["wait_s"], header["limit"], header.get("raw", False)
        self._answer_follower(header["job"])

    def _answer_follower(self, number: int) -> None:
        """Answer the call that follows a job if there is output, an end, or no time left."""
        job = self.jobs[number]
        if job.follower is None:
            return
        call, until, limit, raw = job.follower
        if job.empty and not job.over and time.monotonic() < until:
            return
        job.follower = None
        out, err = job.take(limit)
        header: dict[str, Any] = {
            "job": number,
            "running": not job.over or not job.empty,
            "data" if raw else "stdout": 0,
            "stderr": 1,
        }
        if not header["running"]:
            outcome, _ = jobs.outcome(job)
            header |= {name: outcome[name] for name in ("ok", "error", "code", "timed_out")}
        self._send(call, (header, [out, err]))

    def feed(self, header: dict[str, Any], data: bytes) -> Answer:
        """Input for a job."""
        self._find(header["job"]).feed(data, header["last"])
        return {}, []

    def stop(self, header: dict[str, Any]) -> Answer:
        """Send a signal to a job's whole session; SIGINT in a terminal to its foreground process group, as the
        interrupt key does."""
        job = self._find(header["job"])
        if not 1 <= header["signal"] <= 64:
            raise OperationError(f"expected a signal from 1 to 64, got {header['signal']}")
        if not job.over:
            foreground = job.foreground() if header["signal"] == signal.SIGINT else 0
            if foreground:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(foreground, signal.SIGINT)
            else:
                job.send(header["signal"])
        return {}, []

    def deadlines(self) -> list[float]:
        """The latest times at which the calls that follow jobs must be answered."""
        return [job.follower[1] for job in self.jobs.values() if job.follower is not None]

    def answer_followers(self) -> None:
        """Run after every round of events."""
        for number in list(self.jobs):
            self._answer_follower(number)

    def _ended(self, number: int) -> None:
        self.jobs[number].over = True

    def _find(self, number: int) -> Job:
        job = self.jobs.get(number)
        if job is None:
            raise OperationError(f"there is no job {number}")
        return job


def start(body: jobs.Body, stdin: bytes, open_input: bool, cap: int, timeout: float) -> Job:
    """Fork `body` with its streams in pipes. ProcessLimit."""
    made = jobs.start(body, ("stdout", "stderr"), stdin if stdin or not open_input else b"\0", cap, timeout)
    job = Job(made.pid, made.streams, (made.stdin, stdin), cap, timeout)
    job.keep_open = open_input
    return job


def start_in_terminal(body: jobs.Body, stdin: bytes, cap: int, timeout: float) -> Job:
    """Fork `body` in a terminal of its own, 80 by 24 characters. ProcessLimit."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        pid = jobs.fork()
    except jobs.ProcessLimit:
        os.close(ours)
        os.close(theirs)
        raise
    if pid == 0:
        try:
            os.setsid()
            jobs.accept_interrupts()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(theirs, fd)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.close(ours)
            os.close(theirs)
            body({})
        except BaseException as error:
            with suppress(OSError):
                os.write(2, f"{error}\n".encode())
        finally:
            os._exit(127)
    os.close(theirs)
    os.set_blocking(ours, False)
    job = Job(pid, {ours: "stdout"}, (os.dup(ours), stdin), cap, timeout)
    job.terminal, job.keep_open = ours, True
    return job
