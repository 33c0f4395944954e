"""`headrace chaos`: a run as `headrace up` starts it, with injected faults, and then its audit.

The fault plan (faults.py) says which process fails, how and when. Up to two faults overlap: the broker is killed while
the trainer recovers, a machine while its environment is stopped. Nothing repairs the run by hand: `up`, the supervisors
and the streams bring every process back.

A target has recovered when:
- a process that was killed, stopped or cut off: every actor in it runs and answers a ping; after a kill, in a new
  process. The time counts from the fault, for a stopped process from the moment it continues.
- the broker: it answers, and every actor without a fault of its own answers through it.
- a machine: its environment has a new machine or, after a stop, answers. The time until lost slots are issued again is
  read from the ledger, from their SlotFailed.
A process is at work again with its first durable record after the recovery; waiting for input counts too.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.chaos import faults, figures
from headrace.chaos.faults import BROKER, MACHINE, Fault, PlannedFault
from headrace.chaos.figures import FaultResult
from headrace.config import Config, load
from headrace.launch.output import complain, say, say_report
from headrace.launch.processes import Run, process_groups
from headrace.launch.runs import RunDir, RunError
from headrace.launch.supervision.children import Child
from headrace.launch.supervision.signals import INTERRUPTED, Stopping, interruptible
from headrace.launch.up import through
from headrace.messages import subjects as s
from headrace.messages.judging import Score
from headrace.messages.operations import Heartbeat, Ping

if TYPE_CHECKING:
    from headrace.dashboard.watch import Watch

AT_ONCE = 2
"""Largest number of faults whose targets are down at the same time."""
WORK_PER_FAULT = 8
"""Scores per fault. A run with fewer is lengthened, so that a target works again before its next fault."""
ROLES = {"weight_sender": "weight_sync", "weight_receiver": "weight_sync"}
"""Actors whose role is not their name."""
RECORDS = {
    "curriculum": ("HR_LEDGER", s.LEDGER, ""),
    "judge": ("HR_SCORE", s.SCORE, ""),
    "rollout": ("HR_TURN", s.TURN, ""),
    "trainer": ("HR_STEP", s.STEP, ""),
    "environment": ("HR_EVENT", s.EVENT, "tool_log"),
    "weight_sender": ("HR_EVENT", s.EVENT, "weights_staged"),
}
"""A process by its first actor, and the record that shows it at work: its stream, subject, type on HR_EVENT."""
POLL_S = 0.1
PING_S = (0.3, 0.6, 1.2, 2.4, 5.0)
"""Seconds to wait for an answer, attempt by attempt, so that a lost answer does not count as a late one."""
MID_TRAINING = 0.06
"""Share of the run's work, as the fault plan counts it, that is mid-training."""


def lengthened(config: Config, kills: int) -> Config:
    """The configuration with enough steps for this number of faults."""
    curriculum = config.curriculum
    need = math.ceil(kills * WORK_PER_FAULT / (curriculum.groups_per_step * curriculum.group_size))
    if need <= curriculum.steps:
        return config
    return msgspec.structs.replace(config, curriculum=msgspec.structs.replace(curriculum, steps=need))


class FaultInjector:
    """Injects the planned faults into a run. `up` calls `run` beside the run's processes."""

    def __init__(
        self,
        config: Config,
        kills: int,
        seed: int,
        limit_s: float,
        kinds: Collection[Fault] = faults.ACTOR_FAULTS,
    ) -> None:
        self.planned = faults.plan(config, kills, seed, kinds)
        self.results: list[FaultResult] = []
        self.folder: RunDir | None = None
        self._limit_s = limit_s
        self._rng = random.Random(seed + 1)
        self._scores = self._middle = 0.0
        self._moved = asyncio.Event()
        self._down: set[str] = set()
        self._freed = asyncio.Condition()
        self._records: dict[str, tuple[float, asyncio.Event]] = {}

    async def run(self, run: Run, watch: "Watch") -> None:
        """Inject the plan and wait for recoveries until cancelled. RunError when the time limit is over."""
        self.folder = run.folder
        self._run, self._watch = run, watch
        groups = process_groups(run.config)
        self._children = {child.name: (child, group) for child, group in zip(run.children, groups, strict=True)}
        self._bus = await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials)
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as group:
                group.create_task(self._count())
                for name in self._children:
                    first = self._children[name][1][0]
                    if first in RECORDS:
                        group.create_task(self._watch_records(name, first))
                slots = asyncio.Semaphore(AT_ONCE)
                for number, planned in enumerate(self.planned, 1):
                    await self._due(planned.due)
                    await slots.acquire()
                    await self._claim(planned.target)
                    say(f"fault {number} of {len(self.planned)}: {planned.fault} {planned.target}")
                    group.create_task(self._inject(planned, slots, group))
                await asyncio.Event().wait()
        except TimeoutError:
            raise RunError(
                f"the run did not end within {self._limit_s / 60:g} minutes; raise --minutes or lower --kills", 1
            ) from None
        finally:
            await self._bus.close()

    def progress(self) -> float:
        """Share of the run's work that is done, 0 to 1."""
        config = self._run.config
        groups = config.curriculum.steps * config.curriculum.groups_per_step
        if config.mid_training.tokens > 0 and not self._scores:
            done = self._watch.gauge("trainer", "mid_training_tokens") / config.mid_training.tokens
            self._middle = max(self._middle, MID_TRAINING * min(done, 1.0))
            return self._middle
        return MID_TRAINING + (1 - MID_TRAINING) * self._scores / (groups * config.curriculum.group_size)

    async def _count(self) -> None:
        async for received in self._bus.follow("HR_SCORE", s.SCORE.where(run=self._run.folder.id)):
            if isinstance(received.message, Score) and received.message.lane == "train":
                self._scores += 1
                self._moved.set()

    async def _due(self, share: float) -> None:
        while self.progress() < share:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # the progress of mid-training is on core NATS only
                    await self._moved.wait()

    async def _claim(self, target: str) -> None:
        """Wait until no other fault has this target. There are several machines."""
        async with self._freed:
            await self._freed.wait_for(lambda: target not in self._down)
            if target != MACHINE:
                self._down.add(target)

    async def _inject(self, planned: PlannedFault, slots: asyncio.Semaphore, group: asyncio.TaskGroup) -> None:
        result = FaultResult(planned=planned, at=time.time())
        inject = {BROKER: self._broker, MACHINE: self._machine}.get(planned.target, self._process)
        try:
            since = await inject(result)
            result.recovered_s = time.monotonic() - since
        finally:
            slots.release()
            async with self._freed:
                self._down.discard(planned.target)
                self._freed.notify_all()
        if planned.target in self._records:
            group.create_task(self._until_at_work(result, since))

    async def _process(self, result: FaultResult) -> float:
        planned = result.planned
        child, names = self._children[planned.target]
        old = await self._pid_of(child)
        result.at, since = time.time(), time.monotonic()
        self.results.append(result)
        if planned.fault == "kill":
            os.kill(old, signal.SIGKILL)
        elif planned.fault == "cut":
            result.connections = faults.cut(
                old, [int(url.rpartition(":")[2]) for url in self._run.broker.url.split(",")]
            )
        else:
            async with _stopped(old):
                await asyncio.sleep(planned.asleep_s)
            since = time.monotonic()
        await self._until_recovered(child, names, other_than=old if planned.fault == "kill" else 0)
        return since

    async def _broker(self, result: FaultResult) -> float:
        while not (pid := self._run.broker.pid):
            await asyncio.sleep(POLL_S)
        result.at, since = time.time(), time.monotonic()
        self.results.append(result)
        if result.planned.fault == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            async with _stopped(pid):
                await asyncio.sleep(result.planned.asleep_s)
            since = time.monotonic()
        for name, (child, names) in self._children.items():
            if name not in self._down:
                await self._until_recovered(child, names)
        return since

    async def _machine(self, result: FaultResult) -> float:
        [(child, names)] = [entry for entry in self._children.values() if "environment" in entry[1]]
        while not (before := faults.machines(await self._pid_of(child))):
            await asyncio.sleep(POLL_S)
        result.at, since = time.time(), time.monotonic()
        self.results.append(result)
        chosen = self._rng.choice(sorted(before))
        if result.planned.fault == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
            while not set(faults.machines(await self._pid_of(child))) - set(before):
                await asyncio.sleep(POLL_S)
            return since
        async with _stopped(chosen):
            await asyncio.sleep(result.planned.asleep_s)
        since = time.monotonic()
        await self._until_recovered(child, names)
        return since

    async def _pid_of(self, child: Child) -> int:
        """The child's process id, as soon as it has one."""
        while child.process is None or child.process.returncode is not None:
            await asyncio.sleep(POLL_S)
        return child.process.pid

    async def _until_recovered(self, child: Child, names: tuple[str, ...], other_than: int = 0) -> None:
        """Return when every actor of the process answers a ping with the state running."""
        for timeout in itertools.chain(PING_S, itertools.repeat(PING_S[-1])):
            process = child.process
            while process is None or process.returncode is not None or process.pid == other_than:
                await asyncio.sleep(POLL_S)
                process = child.process
            asked = [self._runs(name, process.pid, timeout) for name in names]
            if all(await asyncio.gather(*asked)):
                return
            await asyncio.sleep(POLL_S)

    async def _runs(self, name: str, pid: int, timeout: float) -> bool:
        kind, _, given = name.partition(":")
        id = s.token(given) if given else f"{kind}-{pid}"
        where = s.RPC_NODE.at(service=ROLES.get(kind, kind), caller=self._bus.role, node=id, method="ping")
        try:
            beat = await self._bus.request(where, Ping(), timeout=timeout)
        except BusError:
            return False
        return isinstance(beat, Heartbeat) and (beat.pid, beat.state) == (pid, "running")

    async def _watch_records(self, name: str, first: str) -> None:
        """Note the time of a process's newest record."""
        stream, subject, kind = RECORDS[first]
        filter = subject.where(run=self._run.folder.id, **({"type": kind} if kind else {}))
        self._records[name] = (0.0, asyncio.Event())
        async for received in self._bus.follow(stream, filter):
            _, seen = self._records[name]
            self._records[name] = (received.time, asyncio.Event())
            seen.set()

    async def _until_at_work(self, result: FaultResult, since: float) -> None:
        name = result.planned.target
        back = time.time()
        while self._records[name][0] < back:
            await self._records[name][1].wait()
        result.working_s = time.monotonic() - since


@contextlib.asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    """Stop a process inside the block; it continues afterwards in any case, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def chaos(args: argparse.Namespace) -> int:
    """Run with faults, then report; 1 unless every fault was injected and all targets are met."""
    if args.kills < 1:
        raise RunError(f"--kills: expected an integer >= 1, got {args.kills}")
    config = lengthened(load(args.config, args.set), args.kills)
    injector = FaultInjector(config, args.kills, args.seed, 60 * args.minutes, args.faults)

    async def body(stopping: Stopping, closing: contextlib.AsyncExitStack) -> int:
        return await through(config, stopping, closing, injector.run)

    ended = ""
    try:
        code = await interruptible(body)
    except (RunError, BusError) as error:
        code, ended = 1, str(error)
        if injector.folder is None:
            raise
        complain(ended)
    end = time.time()
    if injector.folder is None or code == INTERRUPTED:
        return code
    report = await figures.collect(injector.folder, injector.results, args.kills, args.seed, ended, end)
    say_report(report)
    return 0 if code == 0 and all(target.met for target in report.targets.values()) else 1
