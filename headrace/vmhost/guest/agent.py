"""Serves one slot: reads frames from its port, answers each, and never runs the candidate's code itself.

A keeper is the first process of its slot. Its effective user is the tools' own, so it can touch nothing that a tool
could not; its real user is another, so no tool can signal or trace it. While nothing runs it blocks in `read`; with
jobs running it waits in `poll` for output, exits and deadlines. It ends when its port does.
"""

import os
import random
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from . import background, jobs, pytests
from .files import Answer, Refused, Workspace
from .frames import Garbage, Reader, pack
from .worker import Worker

_DRAIN = 32
"""Reads of 64 KiB after a job's exit: more than the largest pipe holds, and an end if someone goes on writing."""

_LATE_NS = 100_000_000


class Keeper:
    """port: the descriptor of the slot's channel; root: its workspace; become: turns a fork into the tools' user."""

    def __init__(self, port: int, root: str, environment: dict[str, str], become: Callable[[], None]) -> None:
        self.port = port
        self.root = root
        self.environment = environment
        self.become = become
        self.workspace = Workspace(root)
        self.seed = 0
        self.opened = False
        self.spawned = False
        self.idle = self.died = False
        self.jobs: dict[int, jobs.Job] = {}
        self.background = background.Background(self.answer)
        self.worker = Worker(root, environment, self._leave, become, self.answer)
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)

    def _leave(self) -> None:
        """In a fork: let go of everything that is the keeper's own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self.port, self.wake_read, self.wake_write):
            os.close(fd)
        self.worker.close()
        for job in self.jobs.values():
            for fd in job.held():
                os.close(fd)

    def serve(self) -> None:
        """Until the port ends."""
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
        """With jobs running, the wake-up descriptor leads to `_reap`; while the keeper blocks in read, this does."""
        self.died = not self.idle
        if self.idle:
            self._reap()

    def _poll(self) -> bytes | None:
        """Wait for one round of events; bytes when the port had some (empty: it ended)."""
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
            elif fd in owners:
                owners[fd].ready(fd)
            elif fd == testing:
                self.worker.ready()
        if died:
            self._reap()
        self._expire()
        if self.background.jobs:
            self.background.turn()
        return data

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.worker.died(pid)
                for job in self.jobs.values():
                    if job.pid == pid:
                        job.status = status
        for number, job in list(self.jobs.items()):
            # Once the process itself ended, what it wrote is in the pipes; whoever else holds them is background.
            if job.status is not None:
                for fd in list(job.streams):
                    for _ in range(_DRAIN):
                        if fd not in job.streams or not select.select([fd], [], [], 0)[0]:
                            break
                        job.ready(fd)
                del self.jobs[number]
                job.close()
                job.done(job)

    def _expire(self) -> None:
        now = time.monotonic()
        for job in self.jobs.values():
            if now >= job.deadline and not job.timed_out:
                job.timed_out = True
                job.kill()
        self.worker.expire(now)

    # -- the operations -------------------------------------------------------------------------------------------

    def answer(self, number: int, answer: Answer) -> None:
        """Send one result."""
        header, bodies = answer
        view = memoryview(pack({"i": number} | header, bodies))
        while view:
            view = view[os.write(self.port, view) :]

    def handle(self, header: dict[str, Any], bodies: Sequence[bytes]) -> None:
        """Start or do one operation."""
        number = header["i"]
        try:
            answer = self.operate(number, header, bodies)
        except Refused as refused:
            answer = {"ok": False, "error": str(refused)}, []
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}, []
        if answer is not None:
            self.answer(number, answer)

    def operate(self, number: int, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer | None:
        """One operation by its name; None when the answer comes later."""
        space = self.workspace
        match header["op"]:
            case "open":
                _await_clock(header["time"])
                self.seed, self.opened = header["seed"], True
                random.seed(self.seed)
                return space.write(header["paths"], list(bodies), [])
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
            case "network":
                return background.network(self, number)
            case "start_job" | "follow_job" | "feed_job" | "stop_job" | "cancel":
                return background.operate(self, number, header, bodies)
            case "push_tar" | "pull_tar":
                from . import trees

                return trees.operate(space, header, bodies)
            case "run_tests":
                return self._tests(number, header)
            case "end":
                return self._quiet(), []
            case "reset" if not self.opened:
                space.write([], [], [self.root])
                return {}, []
        return {"ok": False, "error": f"no such operation: {header['op']}"}, []

    def user(self, name: str) -> Callable[[], None]:
        """What makes a fork that user. Refused for one who does not exist here."""
        if name not in ("", self.environment.get("USER", "")):
            raise Refused(f"there is no user {name!r} here")
        return self.become

    def _quiet(self) -> dict[str, Any]:
        """Kill what still runs, if anything does. A worker that waits for its next run alone is left as it is: ending
        it would cost more than it ever will."""
        if self.spawned or not self.worker.rests():
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self.worker.drop()
        return {}

    def _command(self, header: dict[str, Any], stdin: bytes, folder: str, environment: dict[str, str]) -> jobs.Job:
        if not header["argv"]:
            raise Refused("argv is empty")
        body = jobs.command(header["argv"], folder, environment, self.user(header.get("user", "")))
        job = jobs.start(self.child(body), ("stdout", "stderr"), stdin, header["output_cap"], header["timeout_s"])
        job.call = header.get("call", "")
        return job

    def child(self, body: Callable[[dict[str, int]], None]) -> Callable[[dict[str, int]], None]:
        """A body that first lets go of what is the keeper's."""

        def inner(ends: dict[str, int]) -> None:
            self._leave()
            body(ends)

        return inner

    def _start(self, number: int, job: jobs.Job, outcome: Callable[[jobs.Job], Answer]) -> None:
        self.spawned = True
        job.done = lambda job: self.answer(number, outcome(job))
        self.jobs[number] = job

    def _tests(self, number: int, header: dict[str, Any]) -> Answer | None:
        for path in header["paths"]:
            self.workspace.resolve(path)
        match header["kind"]:
            case "functions":
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
        def body(ends: dict[str, int]) -> None:
            self.become()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(self.environment)
            random.seed(self.seed)
            pytests.child(self.root, header["paths"], ends["report"])

        names = ("stdout", "stderr", "report")
        return jobs.start(self.child(body), names, b"", 65536, header["timeout_s"])


def _await_clock(nanoseconds: int) -> None:
    """A clone that goes on is told the time through another port, which may be read after ours: no file may be older
    than its sandbox."""
    for _ in range(1000):
        if time.time_ns() >= nanoseconds - _LATE_NS:
            return
        time.sleep(0.001)


def _pytest_outcome(job: jobs.Job) -> Answer:
    return pytests.outcome(job.text("report"), job)
