"""The slot agent: reads frames from its slot's port, answers each, and never runs the candidate's code itself.

It is the first process of its slot. Its effective user is the tools' user, so it can touch nothing that a tool could
not; its real user is another one, so no tool can signal or trace it. While nothing runs it blocks in `read`; while jobs
run it waits in `poll` for output, exits and deadlines. It ends when its port closes.

A candidate may fill the slot with processes. When the agent finds the slot full, when a killed job does not die because
the others use all of the processor, or when a job or a test run exceeds its time limit after the kernel refused a fork
or memory, it ends all of them and answers that the limit was reached: an outcome of the task, after which the slot
works again.
"""

import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from . import background, changes, jobs, tunnel
from .files import Answer, Workspace
from .frames import Garbage, Reader, send
from .names import received
from .testing import pytests
from .testing.worker import Worker
from .tools import Namespace, Tools
from .walks import OperationError

_DRAIN_READS = 32
"""Largest number of reads of 64 KiB after a job's exit. The largest pipe holds less; another process may still
write."""
_LATE_NS = 100_000_000
_DIE_S = 2.0
"""How long a killed job may take to die before every other process of the slot is killed as well."""
_END_S = 5.0
"""How long the end of a full slot's processes may take; the host waits longer for an answer."""
LIMIT_REACHED = "the sandbox's process limit was reached, so all of its processes were ended"


class SlotAgent:
    """Serves one slot. Use `serve`."""

    @property
    def home(self) -> str:
        """The home of a harness, outside of the workspace; it ends with the slot."""
        return "/tmp/headrace-home"

    def __init__(
        self,
        port: int,
        root: str,
        environment: dict[str, str],
        become: Callable[[], None],
        tools: Tools | None = None,
    ) -> None:
        """port: descriptor of the slot's channel; root: its workspace; environment: of its tools; become: turns a fork
        into the tools' user; tools: the processes that the slot has started."""
        self.port = port
        self.root = root
        self.environment = environment
        self.become = become
        self.tools = tools or Namespace()
        self.workspace = Workspace(root)
        self.seed = 0
        self.opened = False
        self.spawned = False
        self.idle = self.died = False
        self.jobs: dict[int, jobs.Job] = {}
        self.background = background.Background(self.answer)
        self.worker = Worker(
            root, environment, self._close_own, become, self.answer, self._end_processes, self.tools.exhausted
        )
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)

    def _close_own(self) -> None:
        """In a fork: close every descriptor that belongs to the agent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self.port, self.wake_read, self.wake_write):
            os.close(fd)
        self.worker.close()
        for job in self.jobs.values():
            for fd in job.open_fds():
                os.close(fd)

    def serve(self) -> None:
        """Answer frames until the port closes."""
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        reader = Reader()
        while True:
            if not self.jobs and not self.worker.runs:
                self.idle = True
                if self.died:
                    self.died = False
                    self._reap()
                data = os.read(self.port, 65536)
                self.idle = False
            else:
                polled = self._poll()
                if polled is None:
                    continue
                data = polled
            if not data:
                return
            try:
                frames = reader.feed(data)
            except Garbage:
                return
            for header, bodies in frames:
                self.handle(header, bodies)

    def _on_child(self, _signal: int, _frame: FrameType | None) -> None:
        """While the agent blocks in `read`, reap here; while jobs run, the wake-up descriptor leads to `_reap`."""
        self.died = not self.idle
        if self.idle:
            self._reap()

    def _poll(self) -> bytes | None:
        """Wait for one round of events. Returns what the port delivered: None for nothing, b"" for its end."""
        poll = select.poll()
        poll.register(self.port, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        owners: dict[int, jobs.Job] = {}
        deadlines = [job.deadline for job in self.jobs.values()] + self.background.deadlines()
        for job in self.jobs.values():
            for fd, writing in job.fds():
                owners[fd] = job
                poll.register(fd, select.POLLOUT if writing else select.POLLIN)
        if (testing := self.worker.fileno()) >= 0:
            poll.register(testing, select.POLLIN)
            deadlines.append(self.worker.deadline)
        wait = min(3600.0, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None
        data: bytes | None = None
        died = False
        for fd, _ in poll.poll(None if wait is None else wait * 1000 + 1):
            if fd == self.port:
                data = os.read(fd, 65536)
            elif fd == self.wake_read:
                with suppress(BlockingIOError):
                    os.read(fd, 4096)
                died = True
            elif fd in owners and fd in owners[fd].open_fds():  # an event of this round may have closed it
                owners[fd].ready(fd)
            elif fd == testing:
                self.worker.ready()
        if died:
            self._reap()
        self._expire()
        if self.background.jobs:
            self.background.answer_followers()
        return data

    def _reap(self) -> bool:
        """Collect children that ended and answer for their jobs. Returns whether children are left."""
        left = False
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    left = True
                    break
                self.worker.died(pid)
                for job in self.jobs.values():
                    if job.pid == pid:
                        job.status = status
        for number, job in list(self.jobs.items()):
            # All that the process wrote is in the pipes now. Other processes that hold them are background.
            if job.status is not None:
                for fd in list(job.streams):
                    for _ in range(_DRAIN_READS):
                        if fd not in job.streams or not select.select([fd], [], [], 0)[0]:
                            break
                        job.ready(fd)
                del self.jobs[number]
                job.close()
                job.done(job)
        return left

    def _expire(self) -> None:
        stuck = False
        now = time.monotonic()
        for job in self.jobs.values():
            if now >= job.deadline and not job.timed_out:
                job.timed_out = True
                job.kill()
                job.deadline = now + _DIE_S
                stuck = stuck or self.tools.exhausted()  # what the job left in other sessions starves the next one
            elif now >= job.deadline:
                job.deadline = now + _DIE_S
                stuck = True
        if stuck:
            self._end_all(LIMIT_REACHED)
        self.worker.expire(now)

    # -- the operations -------------------------------------------------------------------------------------------

    def answer(self, number: int, answer: Answer) -> None:
        """Send one result."""
        send(self.port, {"i": number} | answer[0], answer[1])

    def handle(self, header: dict[str, Any], bodies: Sequence[bytes]) -> None:
        """Start or run one operation."""
        number = header["i"]
        try:
            answer = self.operate(number, received(header), bodies)
        except OperationError as refused:
            answer = {"ok": False, "error": str(refused)}, []
        except jobs.ProcessLimit:
            self._end_all(LIMIT_REACHED)
            answer = {"ok": False, "error": LIMIT_REACHED, "code": 1}, []
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}, []
        if answer is not None:
            self.answer(number, answer)

    def operate(self, number: int, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer | None:
        """Run one operation by its name; None when the answer comes later."""
        space = self.workspace
        match header["op"]:
            case "open":
                _await_clock(header["time"])
                self.seed, self.opened = header["seed"], True
                random.seed(self.seed)
                answer = space.write(header["paths"], list(bodies), [])
                if header.get("digest"):
                    with suppress(OperationError):  # too large to be walked
                        answer = {"digest": space.pull([], 0)[0]["digest"]}, []
                return answer
            case "read_file":
                return space.read(header["path"], header["limit"])
            case "write_files":
                return space.write(header["paths"], list(bodies), header["delete"])
            case "replace_lines":
                return space.replace(header["path"], header["first"], header["last"], header["text"])
            case "list_files":
                return space.names(header["pattern"], header["limit"])
            case "search":
                return space.search(header["pattern"], header["glob"], header["context"], header["limit"])
            case "pull_tree":
                return space.pull(header["patterns"], header["limit"])
            case "exec":
                folder = space.resolve(header["cwd"])
                environment = self.environment | header["env"]
                self._start(number, self._command(header, bodies[0], folder, environment), jobs.outcome)
                return None
            case "cancel":
                return self._cancel(header["call"])
            case "start_job":
                return self._start_background(number, header, bodies[0])
            case "follow_job":
                self.background.follow(number, header)
                return None
            case "feed_job":
                return self.background.feed(header, bodies[0])
            case "stop_job":
                return self.background.stop(header)
            case "network":
                return self._start_proxy(number)
            case "start_endpoint":
                home = self.home
                os.makedirs(home, mode=0o700, exist_ok=True)
                listener = tunnel.listen(0)
                address = f"127.0.0.1:{listener.getsockname()[1]}\n{home}"
                return self._start_tunnel(number, listener, True)[0] | {"stdout": 0}, [address.encode()]
            case "apply_changes":
                return changes.apply(space, header, bodies)
            case "push_tar" | "pull_tar":
                from . import trees

                return trees.operate(space, header, bodies)
            case "run_tests":
                return self._tests(number, header)
            case "end":
                self._end_leftovers()
                return {}, []
            case "reset" if not self.opened:
                space.write([], [], [self.root])
                return {}, []
        return {"ok": False, "error": f"no such operation: {header['op']}"}, []

    def user(self, name: str) -> Callable[[], None]:
        """A function that turns a fork into that user. OperationError if there is no such user."""
        if name not in ("", self.environment.get("USER", "")):
            raise OperationError(f"there is no user {name!r} here")
        return self.become

    def _end_leftovers(self) -> None:
        """End the processes that still run, if any. A test worker that only waits for its next run stays: ending it
        would cost more CPU time than it will ever use."""
        if self.spawned or not self.worker.idle():
            self._end_all("the sandbox was released")

    def _end_all(self, reason: str) -> None:
        """End every process of the slot. Jobs that run report their end, a test run fails with the reason."""
        self._end_processes()
        self.worker.end(reason)

    def _end_processes(self) -> None:
        """Kill all of them and reap what dies within `_END_S`: a process that is not reaped counts towards the
        limit."""
        deadline = time.monotonic() + _END_S
        self.tools.kill()
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.005)
            self.tools.kill()

    def _command(self, header: dict[str, Any], stdin: bytes, folder: str, environment: dict[str, str]) -> jobs.Job:
        if not header["argv"]:
            raise OperationError("argv is empty")
        self._check_limit()
        body = jobs.command(header["argv"], folder, environment, self.user(header.get("user", "")))
        job = jobs.start(self.child(body), ("stdout", "stderr"), stdin, header["output_cap"], header["timeout_s"])
        job.call = header.get("call", "")
        return job

    def _check_limit(self) -> None:
        if self.tools.full():
            raise jobs.ProcessLimit

    def child(self, body: jobs.Body) -> jobs.Body:
        """A body that first closes what belongs to the agent."""

        def inner(ends: dict[str, int]) -> None:
            self._close_own()
            body(ends)

        return inner

    def _start(self, number: int, job: jobs.Job, outcome: Callable[[jobs.Job], Answer]) -> None:
        self.spawned = True
        job.done = lambda job: self.answer(number, outcome(job))
        self.jobs[number] = job

    def _cancel(self, call: str) -> Answer:
        for job in self.jobs.values():
            if job.call and job.call == call:
                job.cancelled = True
                job.kill()
                return {}, []
        return {"ok": False, "error": f"nothing runs under call id {call!r}"}, []

    def _start_background(self, number: int, header: dict[str, Any], stdin: bytes) -> Answer:
        if not header["argv"]:
            raise OperationError("argv is empty")
        folder, become = self.workspace.resolve(header["cwd"]), self.user(header["user"])
        body = self.child(jobs.command(header["argv"], folder, self.environment | header["env"], become))
        self.background.ensure_capacity()
        self._check_limit()
        cap, timeout = header["output_cap"], header["timeout_s"]
        if header["terminal"]:
            job = background.start_in_terminal(body, stdin, cap, timeout)
        else:
            job = background.start(body, stdin, header["open_input"], cap, timeout)
        return self._add_background(number, job)

    def _add_background(self, number: int, job: background.Job) -> Answer:
        self.spawned = True
        self.jobs[number] = job
        return self.background.add(number, job)

    def _start_proxy(self, number: int) -> Answer:
        """Start the slot's network proxy as a job, and name it in the environment of later commands."""
        listener = tunnel.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.environment |= {name: address for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
        self.environment |= {name: "localhost,127.0.0.1" for name in ("no_proxy", "NO_PROXY")}
        return self._start_tunnel(number, listener, False)

    def _start_tunnel(self, number: int, listener: socket.socket, endpoint: bool) -> Answer:
        def body(_ends: dict[str, int]) -> None:
            self.become()
            tunnel.serve(listener, endpoint)

        with listener:
            job = background.start(self.child(body), b"", True, tunnel.LIMIT, background.WITHOUT_LIMIT_S)
        return self._add_background(number, job)

    def _tests(self, number: int, header: dict[str, Any]) -> Answer | None:
        for path in header["paths"]:
            self.workspace.resolve(path)
        match header["kind"]:
            case "functions":
                self._check_limit()
                self.worker.run(number, header | {"seed": self.seed})
            case "pytest":
                self._start(number, self._pytest(header), _pytest_outcome)
            case _:
                folder, environment = self.root, self.environment
                command = {"argv": header["argv"], "output_cap": 65536, "timeout_s": header["timeout_s"]}
                command["call"] = header.get("call", "")
                job = self._command(command, b"", folder, environment)
                self._start(number, job, lambda job: pytests.command_outcome(self.workspace, header["argv"], job))
        return None

    def _pytest(self, header: dict[str, Any]) -> jobs.Job:
        body = pytests.body(self.root, header["paths"], self.environment, self.seed, self.become)
        self._check_limit()
        return jobs.start(self.child(body), ("stdout", "stderr", "report"), b"", 65536, header["timeout_s"])


def _await_clock(nanoseconds: int) -> None:
    """Wait until init has set the clock of a clone that resumes. The time comes through another port, which init may
    read after this slot's; without this wait a pushed file could be older than its sandbox."""
    for _ in range(1000):
        if time.time_ns() >= nanoseconds - _LATE_NS:
            return
        time.sleep(0.001)


def _pytest_outcome(job: jobs.Job) -> Answer:
    return pytests.outcome(job.text("report"), job)
