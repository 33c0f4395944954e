"""Jobs that outlive the call that started them: followed, fed and ended by later calls, in a terminal if wanted.

What a job writes waits for whoever follows it, up to a cap; then nobody reads its pipe and it waits itself. So nothing
is lost, nothing grows, and a job that nobody follows stands still instead of filling the machine.
"""

import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import jobs, tunnel
from .files import Answer, Refused

if TYPE_CHECKING:
    from .keeper import Keeper

FOR_EVER_S = 1e9
REMEMBERED = 64
"""Ended jobs whose outcome may still be asked for."""
Send = Callable[[int, Answer], None]


class Job(jobs.Job):
    """A job whose output is taken away in pieces and whose input may go on."""

    asked: tuple[int, float, int] | None = None
    """Who follows: the call's number, until when it waits, how many bytes it takes."""
    over = False
    keep_open = False
    terminal = -1

    def fds(self) -> list[tuple[int, bool]]:
        """Full streams are not waited for: their writer waits instead."""
        reading = [(fd, False) for fd, name in self.streams.items() if self._room(name) > 0]
        return [*reading, (self.stdin, True)] if self.stdin >= 0 and self._unwritten else reading

    def _room(self, name: str) -> int:
        spare = 0 if self.status is None else 1 << 20  # what an ended job left in its pipes is less than this
        return self.cap + spare - len(self.kept[name])

    def ready(self, fd: int) -> None:
        """Move what can be moved, and never more than there is room for."""
        if fd == self.stdin:
            self._write()
            return
        name = self.streams[fd]
        room = self._room(name)
        if room <= 0:
            return
        try:
            data = os.read(fd, min(65536, room))
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other side is closed
            data = b""
        if not data:
            del self.streams[fd]
            os.close(fd)
        self.kept[name] += data

    def feed(self, data: bytes, last: bool) -> None:
        """More input. Refused when it takes none."""
        if self.stdin < 0:
            raise Refused("its input is closed")
        if len(self._unwritten) + len(data) > 1 << 20:
            raise Refused("it does not read its input: a MiB of it waits already")
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
        """The next pieces of both streams."""
        pieces = []
        for name in ("stdout", "stderr"):
            kept = self.kept.get(name, bytearray())
            pieces.append(bytes(kept[:limit]))
            del kept[:limit]
        return pieces[0], pieces[1]

    @property
    def empty(self) -> bool:
        """Whether everything that it wrote was taken."""
        return not any(self.kept.values())


class Background:
    """All of a slot's."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.jobs: dict[int, Job] = {}

    def make_room(self) -> None:
        """For one more job: the oldest that ended is forgotten. Refused when all of them run."""
        if len(self.jobs) >= REMEMBERED:
            ended = next((number for number, job in self.jobs.items() if job.over), None)
            if ended is None:
                raise Refused(f"{REMEMBERED} jobs run already")
            del self.jobs[ended]

    def start(self, number: int, job: Job) -> Answer:
        """A job that was just forked; its number is the call's."""
        self.jobs[number] = job
        job.done = lambda _: self._ended(number)
        return {"job": number, "running": True}, []

    def follow(self, number: int, header: dict[str, Any]) -> Answer | None:
        """The next piece now, or None while there is none and the caller waits."""
        job = self._find(header["job"])
        if job.asked is not None:
            self._send(job.asked[0], ({"ok": False, "error": "someone else follows it now"}, []))
        job.asked = number, time.monotonic() + header["wait_s"], header["limit"]
        self.look(header["job"])
        return None

    def look(self, of: int) -> None:
        """Answer whoever follows a job, if there is something to say."""
        job = self.jobs[of]
        if job.asked is None:
            return
        number, until, limit = job.asked
        if job.empty and not job.over and time.monotonic() < until:
            return
        job.asked = None
        out, err = job.take(limit)
        header: dict[str, Any] = {"job": of, "running": not job.over or not job.empty, "stdout": 0, "stderr": 1}
        if not header["running"]:
            outcome, _ = jobs.outcome(job)
            header |= {name: outcome[name] for name in ("ok", "error", "code", "timed_out")}
        self._send(number, (header, [out, err]))

    def feed(self, header: dict[str, Any], data: bytes) -> Answer:
        """Input for a job."""
        self._find(header["job"]).feed(data, header["last"])
        return {}, []

    def stop(self, header: dict[str, Any]) -> Answer:
        """A signal for a job's whole session."""
        job = self._find(header["job"])
        if not 1 <= header["signal"] <= 64:
            raise Refused(f"there is no signal {header['signal']}")
        if not job.over:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, header["signal"])
        return {}, []

    def deadlines(self) -> list[float]:
        """When followers want to hear something, whatever it is."""
        return [job.asked[1] for job in self.jobs.values() if job.asked is not None]

    def turn(self) -> None:
        """After every round of events."""
        for of in list(self.jobs):
            self.look(of)

    def _ended(self, number: int) -> None:
        self.jobs[number].over = True

    def _find(self, number: int) -> Job:
        job = self.jobs.get(number)
        if job is None:
            raise Refused(f"there is no job {number}")
        return job


def operate(keeper: "Keeper", number: int, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer | None:
    """One operation on jobs; None when the answer comes later."""
    match header["op"]:
        case "start_job":
            if not header["argv"]:
                raise Refused("argv is empty")
            folder, become = keeper.workspace.resolve(header["cwd"]), keeper.user(header["user"])
            environment = keeper.environment | header["env"]
            body = keeper.child(jobs.command(header["argv"], folder, environment, become))
            keeper.background.make_room()
            how = header["open_input"], header["terminal"], header["output_cap"], header["timeout_s"]
            job = start(body, bodies[0], *how)
            answer = keeper.background.start(number, job)
            keeper.spawned = True
            keeper.jobs[number] = job
            return answer
        case "follow_job":
            return keeper.background.follow(number, header)
        case "feed_job":
            return keeper.background.feed(header, bodies[0])
        case "stop_job":
            return keeper.background.stop(header)
    for other in keeper.jobs.values():
        if other.call and other.call == header["call"]:
            other.cancelled = True
            other.kill()
            return {}, []
    return {"ok": False, "error": f"nothing runs under {header['call']!r}"}, []


def network(keeper: "Keeper", number: int) -> Answer:
    """Start the slot's proxy as a job, and tell later commands of it."""

    listener = tunnel.listen()

    def body(_ends: dict[str, int]) -> None:
        keeper.become()
        tunnel.serve(listener)

    here = f"http://127.0.0.1:{listener.getsockname()[1]}"
    keeper.environment |= {name: here for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    keeper.environment |= {name: "localhost,127.0.0.1" for name in ("no_proxy", "NO_PROXY")}
    with listener:
        job = start(keeper.child(body), b"", True, False, tunnel.LIMIT, FOR_EVER_S)
    keeper.spawned = True
    keeper.jobs[number] = job
    return keeper.background.start(number, job)


def start(
    body: Callable[[dict[str, int]], None], stdin: bytes, open_input: bool, terminal: bool, cap: int, timeout: float
) -> Job:
    """Fork `body`, its streams in pipes or in a terminal of its own."""
    if terminal:
        return _in_terminal(body, stdin, cap, timeout)
    made = jobs.start(body, ("stdout", "stderr"), stdin if stdin or not open_input else b"\0", cap, timeout)
    job = Job(made.pid, made.streams, (made.stdin, stdin), cap, timeout)
    job.keep_open = open_input
    return job


def _in_terminal(body: Callable[[dict[str, int]], None], stdin: bytes, cap: int, timeout: float) -> Job:
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
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
