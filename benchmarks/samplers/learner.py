"""Stand-ins for the trainer and for the way of a version to the samplers: real records, recorded durations.

The stand-in trainer reads the closings and fetches every Trajectory and Score as the trainer does (`Closings`), writes
the fence, the StepManifest and the StepDone under their expected sequences, and announces a version. It computes
nothing: a step lasts as long as a recorded one, however many slots it has, as if the trainer grew with the samplers.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from benchmarks.samplers.recorded import Trace
from headrace.actors.trainer import records
from headrace.actors.trainer.closings import Batch, Closings
from headrace.algorithms.staleness import staleness
from headrace.bus.runtime.actor import Actor
from headrace.ledger.seeds import seed_of
from headrace.messages.ledger import Fence
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT, STEP
from headrace.messages.training import SnapshotReady, StepDone, StepManifest
from headrace.messages.weights import WeightsStaged
from headrace.replay.tokens import versions

HASH = "simulated-{}"
"""State hash of a version."""


class StandInTrainer(Actor):
    """GroupClosed, Trajectory, Score in; StepManifest, StepDone, SnapshotReady out."""

    role: ClassVar[str] = "trainer"
    trace: ClassVar[Trace]
    speed: ClassVar[float]

    async def start(self) -> None:
        """Write the fence, announce version 0, then take steps."""
        fence = Fence(run=self.run, actor="trainer", id=self.id)
        self._seq = await self.bus.publish(STEP.at(run=self.run), fence)
        self._closings = Closings(self.bus, self.run, self.config.curriculum.groups_per_step)
        self._draws = random.Random(seed_of(self.config.run.seed, "steps"))
        await self._announce(0)
        self.spawn(self._closings.follow(0, lambda _: None), "collecting")
        self.spawn(self._train(), "training")

    async def _train(self) -> None:
        for step in range(self.config.curriculum.steps):
            began = time.monotonic()
            groups = range(self._closings.groups_per_step)
            batch = Batch.of([await self._closings.ready.get() for _ in groups])
            await self._step(step, batch, time.monotonic() - began)
            await self._announce(step + 1)

    async def _step(self, step: int, batch: Batch, waited_s: float) -> None:
        began = time.monotonic()
        window = self._closings.window(step)
        plan = records.StepPlan(step, HASH.format(step), batch.groups, "simulated", window)
        manifest = records.manifest(self.config, self.run, plan)
        manifest_seq = await self._write(manifest)
        ages = await asyncio.to_thread(histogram, step, batch.records[0].values())
        lasts = self._draws.choice(self.trace.step_s) / self.speed
        await asyncio.sleep(lasts - (time.monotonic() - began))
        done = StepDone(
            run=self.run,
            step=step,
            version=step + 1,
            state_hash=HASH.format(step + 1),
            manifest_seq=manifest_seq,
            groups=tuple(group.group for group in batch.groups),
            staleness_bound=window.bound if window is not None else self.config.curriculum.staleness,
            waited_s=waited_s,
            trained_slots=sum(len(group.slots) for group in batch.groups),
            tokens=sum(ages.values()),
            staleness={str(age): tokens for age, tokens in sorted(ages.items())},
            staleness_max=max(ages, default=0),
            seconds=time.monotonic() - began,
        )
        await self._write(done)

    async def _write(self, record: StepManifest | StepDone) -> int:
        name = f"{self.run}.{record.type_name}.{record.step}.0"
        self._seq = await self.bus.publish(STEP.at(run=self.run), record, msg_id=name, expect=self._seq)
        return self._seq

    async def _announce(self, version: int) -> None:
        ready = SnapshotReady(run=self.run, version=version, path="", state_hash=HASH.format(version), bytes=0)
        await self.publish_event(ready, msg_id=f"{self.run}.snapshot.{version}")


class Stager(Actor):
    """SnapshotReady in, WeightsStaged out after a recorded time: a sender and the receiver of the samplers' node."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Follow the snapshots."""
        self._draws = random.Random(seed_of(self.config.run.seed, "staging"))
        self.spawn(self._stage(), "staging")

    async def _stage(self) -> None:
        trace, speed = StandInTrainer.trace, StandInTrainer.speed
        where = EVENT.where(run=self.run, actor="trainer", type=SnapshotReady.type_name)
        async for received in self.bus.follow("HR_EVENT", where):
            ready = received.message
            took = self._draws.choice(trace.staged_s) / speed
            await asyncio.sleep(took)
            staged = WeightsStaged(
                run=self.run,
                node=self.bus.node,
                region="",
                version=ready.version,
                path="",
                state_hash=ready.state_hash,
                stage_s=took,
            )
            await self.publish_event(staged)


def histogram(step: int, trajectories: Iterable[Trajectory]) -> Counter[int]:
    """Staleness to number of sampled tokens of a batch."""
    return Counter(staleness(step, version) for made in trajectories for version in versions(made))
