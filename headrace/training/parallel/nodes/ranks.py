"""Starts the other processes of a trainer's group and ends them with the first process.

Rank 0 is the process that opens the trainer: the actor's, or a replay's. A thread of it runs torch's elastic agent,
which starts the machine's other ranks; on another machine, `headrace trainer join` runs the agent. When a rank ends,
the agent ends the machine's other ranks, and the collective in which rank 0 waits raises an error. This agent never
restarts ranks: the actor's supervisor restarts the actor.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from headrace.config import Config
from headrace.parent_death import ending_with_parent
from headrace.process_stat import STOPPED_S, Stops, stopped_too_long
from headrace.python_modules import module_command
from headrace.registry import admitted
from headrace.training.parallel import group
from headrace.training.parallel.interface import GroupError, Loss, StepRaised
from headrace.training.parallel.nodes.meeting import POLL_S, Meeting, MeetingHost, of_group

logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
"""It warns of an agent in a thread, whose ranks might outlive their starter: these end with it."""
GRACE_S = 5.0
"""Seconds to wait after a broken connection until a process ends, because that end is the cause to report."""
STOP_S = 6.0
"""Seconds that the processes may take to end after the order to stop: less than the 10 s of an actor's stop."""
BARRIER_S = 2.0
"""Seconds for the agents of all nodes to see that their ranks have ended in order."""
RAISED = 4
"""Exit code of a rank in which a step raised."""
DUMP = signal.SIGUSR1
"""The signal at which a rank writes the stacks of all its threads to its log."""
DUMP_S = 2.0
"""Seconds for ranks to write their stacks to their logs."""


class Hello(msgspec.Struct, frozen=True):
    """From rank 0 to all others, when it is about to join the group."""

    config: Config
    folder: str
    """The trainer's folder in node 0."""


class Agent(LocalElasticAgent):
    """torch's agent of one machine's ranks. It also kills a rank that a signal has stopped for long, and says why the
    ranks have ended."""

    def __init__(self, meeting: Meeting, count: int, restarts: int, failed: Callable[[Loss], None]) -> None:
        """failed: gets the first loss of each life of the ranks."""
        self.meeting, self._failed = meeting, failed
        self._stops = [Stops() for _ in range(count)]
        self._stopped = 0
        """The process that was killed because it was stopped for long."""
        self._killing = threading.Event()
        places = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        }
        # The names that this machine's configuration admits, not node 0's.
        rank = module_command("headrace.training.parallel.rank", msgspec.json.encode(admitted()).decode())
        program, *words = ending_with_parent(["env", *(f"{k}={v}" for k, v in places.items()), *rank], signal.SIGKILL)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=count,
            rdzv_handler=meeting,
            entrypoint=program,
            args=tuple(words),
            max_restarts=restarts,
            monitor_interval=POLL_S,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), exit_barrier_timeout=BARRIER_S)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks that have been started last."""
        return list(self._pcontext.pids().values()) if self._pcontext is not None else []

    def kill(self) -> None:
        """From any thread: kill all ranks, of which this does not wait for the end."""
        self._killing.set()

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        for pid, stop in zip(self.pids, self._stops, strict=True):
            if stop.seconds(pid, POLL_S) >= STOPPED_S:
                self._stopped = pid
                os.kill(pid, signal.SIGKILL)
        if self._killing.is_set():
            self._shutdown(signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            number, failure = next(iter(result.failures.items()))  # the first one; the agent has ended the others
            self._failed(self._loss(number + 1, failure))
        return result

    def _loss(self, rank: int, failure: ProcessFailure) -> Loss:
        if failure.pid == self._stopped:
            return Loss(f"rank {rank}: {stopped_too_long(failure.pid)}", f"rank {rank} was stopped by a signal")
        code, key = failure.exitcode, f"why/{rank}"
        words = self.meeting.group.get(key).decode() if self.meeting.group.check([key]) else ""
        if code == RAISED:
            how = "raised in a step"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        how += f": {words}" if words else ""
        raised = f"rank {rank}: {words}" if code == RAISED else ""
        return Loss(f"rank {rank} (process {failure.pid}) {how}", f"rank {rank} {how}", raised)


class Ranks:
    """All processes of a group except the first."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Start the processes of this machine when all nodes are here. TrainerError, GroupError as `Host`."""
        self.hello = Hello(config, str(folder.resolve()))
        self._stall_s = config.trainer.stall_s
        self._loss, self._begun, self._lock = Loss(""), threading.Event(), threading.Lock()
        self.meeting = MeetingHost(config)
        self.store = of_group(self.meeting.store, self.meeting.number)
        here = config.trainer.machine_ranks - 1
        self.agent = Agent(self.meeting, here, 0, self.fail) if here else None
        works = [*([self._run] if here else []), *([self._watch] if self.meeting.nodes > 1 else [])]
        self._threads = [threading.Thread(target=work, name="ranks", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        assert self.agent is not None
        try:
            self.agent.run()
        except Exception as error:
            self.fail(Loss(f"the agent of the ranks: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        while not self._begun.wait(POLL_S):
            if (loss := self.meeting.lost()) is not None:
                self.fail(loss)

    @property
    def why(self) -> str:
        """As `interface.Others`."""
        return self._loss.text

    def _begin(self, loss: Loss) -> bool:
        """Begin to end, without a text in order. False when that has begun already; its reason is then kept."""
        with self._lock:
            if self._begun.is_set():
                return False
            self._loss = loss
            self._begun.set()  # after the text, which its waiters read
            return True

    def fail(self, loss: Loss) -> None:
        """As `interface.Others`."""
        if self._begin(loss):
            self._kill()

    def _kill(self) -> None:
        self.meeting.close()
        self.meeting.tell(self._loss)
        if self.agent is not None:
            self.agent.kill()
        group.abort()

    def wait(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Return when all processes are about to join the group. GroupError when one ends before.

        The first process calls it before it joins, because nothing ends its wait for a process that never comes.
        waiting: called often, with a text about the nodes that are missing; empty when none is.
        """
        complete = False
        while not complete or self.store.add("arrived", 0) < self.hello.config.trainer.ranks - 1:
            waiting(missing := "" if complete else self.meeting.missing())
            complete = not missing
            if self._begun.wait(POLL_S):
                raise self.explained(RuntimeError("a process has ended"))
        self.store.set("hello", msgspec.json.encode(self.hello).decode())

    def explained(self, error: Exception, where: str = "", *, step: bool = False) -> GroupError:
        """The error to report for one that the end of a process may have caused: it names the process that ended first,
        for whose end this waits a while. where: the moment, for `GroupError.alike`. step: the error is that of a step,
        and is a StepRaised when no process was lost."""
        raised_here = step and not group.broken(error)
        late = group.timed_out(error)
        self._begun.wait(0.0 if raised_here or late else GRACE_S)
        loss = self._loss
        if not loss.text and late:
            self._dump()
            alike = f"no exchange of the ranks ended within {self._stall_s:g} s"
            text = (
                f"{alike}: the log has the stacks of their threads; raise [trainer] stall_s where a rank needs longer"
            )
            loss = Loss(text, alike)
        if not loss.text:
            text = f"rank 0: {type(error).__name__}: {error}"
            loss = Loss(text, text, text if raised_here else "")
        alike = f"{where}: {loss.alike or loss.text}" if where else loss.alike or loss.text
        return StepRaised(loss.text, alike, loss.raised) if step and loss.raised else GroupError(loss.text, alike)

    def _dump(self) -> None:
        """Let every process of this machine write the stacks of its threads to its log."""
        with suppress(OSError, ValueError, AttributeError):  # a standard error without a file
            faulthandler.dump_traceback(sys.__stderr__)  # type: ignore[arg-type]
        for pid in self.agent.pids if self.agent is not None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP)
        time.sleep(DUMP_S)

    def end(self, settle: Callable[[], None] = lambda: None) -> None:
        """Kill the group. settle: called before the group's connections are closed; ends threads that use them."""
        self._begin(Loss(""))
        self._kill()
        self._join()
        settle()
        group.leave()

    def stop(self, tell: Callable[[], None]) -> None:
        """End the group after the order to stop, which `tell` sends; kill processes that take longer than STOP_S."""
        if self._begin(Loss("")):
            with suppress(RuntimeError):
                tell()
        self._join(STOP_S)
        self.meeting.close()
        group.leave()

    def _join(self, seconds: float = 0.0) -> None:
        """Return when this machine's processes have ended. After `seconds` it kills them."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.agent is not None:
            self.agent.kill()
        for thread in self._threads:
            thread.join()


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank on this machine: a CUDA device of its own, or the CPU. rank: among those of its machine."""
    return torch.device("cuda", rank) if device.type == "cuda" else device
