"""Processes that the agent runs for its slot: commands, and forks that run pytest.

The agent reads a job's output as it comes, keeps it up to a cap and discards the rest, so a writer without end costs
time and never memory. Each job is a session of its own; at its time limit the whole session is killed.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Body = Callable[[dict[str, int]], None]
"""The code of a forked process; it receives the write ends of its pipes by name and does not return."""
Done = Callable[["Job"], None]


class ProcessLimit(Exception):
    """The slot holds as many processes as it may, so no other one can be forked."""


def fork() -> int:
    """os.fork(). ProcessLimit when the slot's control group or the user's limit refuses another process."""
    try:
        return os.fork()
    except BlockingIOError:
        raise ProcessLimit from None


class Job:
    """One running process with its captured streams."""

    def __init__(self, pid: int, streams: dict[int, str], stdin: tuple[int, bytes], cap: int, timeout: float) -> None:
        """streams: read ends and their names; stdin: write end (-1: none) and the bytes for it; cap: bytes kept of a
        stream; timeout: seconds."""
        self.pid = pid
        self.streams = streams
        self.stdin, self._unwritten = stdin
        self.output: dict[str, bytearray] = {name: bytearray() for name in streams.values()}
        self.cap = cap
        self.caps = {"report": 8 << 20}
        self.truncated = False
        self.deadline = time.monotonic() + timeout
        self.timed_out = False
        self.call = ""
        """Id of the call that started it, by which it can be cancelled."""
        self.cancelled = False
        self.status: int | None = None
        self.done: Done = lambda job: None

    def fds(self) -> list[tuple[int, bool]]:
        """Descriptors to poll: (fd, for writing)."""
        reading = [(fd, False) for fd in self.streams]
        return [*reading, (self.stdin, True)] if self.stdin >= 0 else reading

    def open_fds(self) -> list[int]:
        """All descriptors that are open."""
        return [*self.streams, self.stdin] if self.stdin >= 0 else list(self.streams)

    def ready(self, fd: int) -> None:
        """Read or write what is possible on one descriptor."""
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
        capacity = self.caps.get(name, self.cap) - len(self.output[name])
        self.output[name] += data[: max(capacity, 0)]
        self.truncated |= len(data) > capacity

    def kill(self) -> None:
        """End the job's session."""
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to every process group of the job's session, and to a fork that has no session yet."""
        for group in _groups(self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.pid) != self.pid:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close the descriptors that are still open; background children of the job may hold the other ends."""
        for fd in self.open_fds():
            os.close(fd)
        self.streams, self.stdin = {}, -1

    @property
    def code(self) -> int:
        """Exit code; a signal counts as its negative number."""
        return os.waitstatus_to_exitcode(self.status) if self.status is not None else -signal.SIGKILL

    def text(self, name: str) -> bytes:
        """The part of a stream that was kept."""
        return bytes(self.output.get(name, b""))


def _groups(session: int) -> set[int]:
    """The process groups of a session: a shell with job control, or a program such as timeout, has more than one."""
    groups = {session}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            if int(fields[3]) == session:
                groups.add(int(fields[2]))
    return groups


def accept_interrupts() -> None:
    """In a fork: undo that the agent's parent ignores SIGINT, which a program would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(body: Body, names: tuple[str, ...], stdin: bytes, cap: int, timeout: float) -> Job:
    """Fork a process that runs `body` with stdin, stdout and stderr connected. ProcessLimit.

    names: streams to capture, ``stdout`` and ``stderr`` among them; stdin: what the process reads (empty: /dev/null);
    cap: bytes kept of each stream; timeout: seconds.
    """
    pipes = {name: os.pipe() for name in names}
    source = os.pipe() if stdin else None
    try:
        pid = fork()
    except ProcessLimit:
        for pair in (*pipes.values(), source or ()):
            for fd in pair:
                os.close(fd)
        raise
    if pid == 0:
        try:
            os.setsid()
            accept_interrupts()
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


def command(argv: list[str], folder: str, environment: dict[str, str], become: Callable[[], None]) -> Body:
    """The body of a job that becomes another program, as the user that `become` selects."""

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
