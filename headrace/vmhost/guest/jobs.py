"""Processes that a keeper runs for its slot: commands, and forks that run pytest.

A job's output is read as it comes, kept up to a cap and counted beyond it, so a writer without end costs time, never
memory. Each job is a session of its own; at its time limit the whole session is killed.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Done = Callable[["Job"], None]


class Job:
    """One running process with its captured streams."""

    def __init__(self, pid: int, streams: dict[int, str], stdin: tuple[int, bytes], cap: int, timeout: float) -> None:
        self.pid = pid
        self.streams = streams
        self.stdin, self._unwritten = stdin
        self.kept: dict[str, bytearray] = {name: bytearray() for name in streams.values()}
        self.cap = cap
        self.caps = {"report": 8 << 20}
        self.truncated = False
        self.deadline = time.monotonic() + timeout
        self.timed_out = False
        self.call = ""
        """What its caller calls it, to cancel it."""
        self.cancelled = False
        self.status: int | None = None
        self.done: Done = lambda job: None

    def fds(self) -> list[tuple[int, bool]]:
        """Descriptors to wait for: (fd, for writing)."""
        reading = [(fd, False) for fd in self.streams]
        return [*reading, (self.stdin, True)] if self.stdin >= 0 else reading

    def held(self) -> list[int]:
        """All descriptors that are open."""
        return [*self.streams, self.stdin] if self.stdin >= 0 else list(self.streams)

    def ready(self, fd: int) -> None:
        """Move what can be moved on one descriptor."""
        if fd == self.stdin:
            try:
                self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]
            except BlockingIOError:
                return
            except OSError:
                self._unwritten = b""
            if not self._unwritten:
                os.close(fd)
                self.stdin = -1
            return
        name = self.streams[fd]
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os.close(fd)
            del self.streams[fd]
            return
        room = self.caps.get(name, self.cap) - len(self.kept[name])
        self.kept[name] += data[: max(room, 0)]
        self.truncated |= len(data) > room

    def kill(self) -> None:
        """End the job's session."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of descriptors that are still open; background children may hold the other ends."""
        for fd in self.held():
            os.close(fd)
        self.streams, self.stdin = {}, -1

    @property
    def code(self) -> int:
        """Exit code; minus the signal's number when one ended it."""
        return os.waitstatus_to_exitcode(self.status) if self.status is not None else -signal.SIGKILL

    def text(self, name: str) -> bytes:
        """What was kept of a stream."""
        return bytes(self.kept.get(name, b""))


def start(
    body: Callable[[dict[str, int]], None], names: tuple[str, ...], stdin: bytes, cap: int, timeout: float
) -> Job:
    """Fork a process that runs `body(write ends by name)` with stdin, stdout and stderr set up, and never returns."""
    pipes = {name: os.pipe() for name in names}
    source = os.pipe() if stdin else None
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            fd = source[0] if source else os.open("/dev/null", os.O_RDONLY)
            os.dup2(fd, 0)
            os.dup2(pipes["stdout"][1], 1)
            os.dup2(pipes["stderr"][1], 2)
            body({name: pair[1] for name, pair in pipes.items()})
        except BaseException as error:
            with suppress(OSError):
                os.write(2, f"{error}\n".encode())
        finally:
            os._exit(127)
    streams = {}
    for name, (read, write) in pipes.items():
        os.close(write)
        os.set_blocking(read, False)
        streams[read] = name
    target = -1
    if source:
        os.close(source[0])
        target = source[1]
        os.set_blocking(target, False)
    return Job(pid, streams, (target, stdin), cap, timeout)


def command(
    argv: list[str], folder: str, environment: dict[str, str], become: Callable[[], None]
) -> Callable[..., None]:
    """The body of a job that becomes another program, under the tools' user."""

    def body(_ends: dict[str, int]) -> None:
        become()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.chdir(folder)
        os.execvpe(argv[0], argv, environment)

    return body


def outcome(job: Job) -> tuple[dict[str, Any], list[bytes]]:
    """The answer of a finished command."""
    limit = "it ran past its time limit" if job.timed_out else "it was cancelled" if job.cancelled else ""
    code = job.code
    error = limit or (f"exit code {code}" if code else "")
    header = {"ok": not error, "error": error, "code": code, "timed_out": job.timed_out, "truncated": job.truncated}
    return header | {"stdout": 0, "stderr": 1}, [job.text("stdout"), job.text("stderr")]
