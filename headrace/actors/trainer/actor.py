"""The trainer: closings in their order become batches, batches become versions.

Batch k is the GroupClosed records kP to kP + P - 1 of the run, and takes version k to version k + 1. A manifest says
everything that a step depends on and is written before the step, on top of the last record of the run's steps: a
trainer that was replaced is refused there, and one that was killed runs published manifests again before it takes a new
batch. Records are fetched while the step before still runs, and steps run in a thread of their own.

Files: <run>/snapshots/v<version>.safetensors, immutable, the newest bound + 1 of them; <run>/checkpoints/.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from headrace.actors import trainer_policy, trainer_records
from headrace.actors.trainer_shelf import Shelf
from headrace.algorithms.staleness import Bounds
from headrace.bus import tracing
from headrace.bus.actor import Actor
from headrace.bus.errors import BusError, WrongSequence
from headrace.messages.ledger import Fence, GroupClosed, StalenessBound
from headrace.messages.subjects import CLOSE, STEP
from headrace.messages.training import BatchGroup, SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.replay.fetching import Records, fetch
from headrace.replay.recipe import under
from headrace.training.mid_training import Progress
from headrace.training.step import StepOutcome, refuse
from headrace.training.trainer import Trainer as Machine
from headrace.weights import chain, collect
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

T = TypeVar("T")
AGAIN_S = 30.0
"""After this time old weights that could not be collected are tried again."""


class Stopped(Exception):
    """Raised inside the worker thread to end mid-training early."""


class Ready(NamedTuple):
    """A closed group with its records."""

    group: BatchGroup
    records: Records


class Trainer(Actor):
    """GroupClosed, Trajectory, Score in; StepManifest, StepDone, StepFailed, SnapshotReady out."""

    role: ClassVar[str] = "trainer"

    async def start(self) -> None:
        """Prepare in the background: a run's first minute may be mid-training."""
        own = self.config.curriculum
        self.folder = Path(self.config.run.dir) / self.run
        self.groups_per_step = own.groups_per_step
        self.machine: Machine | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._progress: Progress | None = None
        self._stopping = False
        self._bounds: Bounds | None = None
        """The staleness bound of every batch, as the closings say."""
        self._ready: asyncio.Queue[Ready] = asyncio.Queue(2 * own.groups_per_step)
        self.spawn(self._live(), "training")
        self.every(1.0, self._measure, "metrics")

    async def stop(self) -> None:
        """Let the step in work end; mid-training ends at its next report."""
        self._stopping = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        try:
            machine = await self._prepare()
            await self._catch_up(machine)
            self.spawn(self._collect(self._taken(machine)), "collecting")
            if self.config.weights.collect_chains:
                self.spawn(self._forget_weights(), "old weights")
            while True:
                await self._next(machine)
        except WrongSequence as error:
            # Another trainer has taken over: nothing of ours is accepted any more.
            self.status = "superseded"
            await self.event("superseded", str(error), "error")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _prepare(self) -> Machine:
        """Take over the steps, then resume, or make version 0."""
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), fence)
        folder = self.folder / "checkpoints"
        if not (folder / "checkpoint.safetensors").exists():
            await self.event("phase", "mid-training")
        self.status = "preparing"

        def work() -> Machine:
            text = trainer_policy.tokenizer(self.config, self.folder)
            return Machine.prepare(
                self.config,
                folder,
                tokenizer_json=text,
                traces=lambda: self._until_stopped(trainer_policy.mid_training(self.config, text)),
                progress=self._on_progress,
            )

        self.machine = machine = await self._in_thread(work)
        self.shelf = Shelf(self.folder, machine, self.config)
        await self.event("prepared", f"version {machine.version}", version=machine.version, resumed=machine.resumed)
        return machine

    def _until_stopped(self, traces: Iterator[T]) -> Iterator[T]:
        """Read in the worker thread: who asks us to stop does not wait for the next report."""
        for trace in traces:
            if self._stopping:
                raise Stopped
            yield trace

    def _on_progress(self, progress: Progress) -> None:
        """Called in the worker thread."""
        self._progress = progress
        if self._stopping:
            raise Stopped

    async def _catch_up(self, machine: Machine) -> None:
        """Run again what was published after the checkpoint; publish the version that comes out."""
        manifests: dict[int, tuple[int, StepManifest]] = {}
        outcomes: dict[int, StepDone | StepFailed] = {}
        async for received in self.bus.history("HR_STEP", STEP.at(run=self.run)):
            message = received.message
            if isinstance(message, StepManifest):
                manifests[message.step] = (received.seq, message)
            elif isinstance(message, StepDone | StepFailed):
                outcomes[message.step] = message
        self._hash = await self._in_thread(machine.state.hash)
        rate = 0.0
        while machine.version in manifests:
            seq, manifest = manifests[machine.version]
            known = outcomes.get(manifest.step)
            if known is not None and known.incarnation != manifest.incarnation:
                known = None  # its newest manifest never came to an outcome
            rate = await self._again(machine, seq, manifest, known)
        self._step = machine.version
        await self._publish(machine, rate)

    async def _again(
        self, machine: Machine, seq: int, manifest: StepManifest, known: StepDone | StepFailed | None
    ) -> float:
        """Run one manifest again; its learning rate. Other bits than were published make a new incarnation."""
        records = await fetch(self.bus, manifest.groups)
        if manifest.base_hash != self._hash:
            law = trainer_records.Law.as_in(manifest)
            seq, manifest = await self._announce(machine, manifest.incarnation + 1, manifest.groups, law)
            known = None
        result = await self._take(machine, manifest, records)
        if known is not None and known.state_hash != result.state_hash:
            text = f"step {manifest.step} gave {result.state_hash}, published was {known.state_hash}"
            await self.event("new_incarnation", text, "warning", step=manifest.step)
            renewed = trainer_records.manifest(
                self.config,
                self.run,
                manifest.step,
                manifest.incarnation + 1,
                manifest.base_hash,
                manifest.groups,
                machine.numerics.fingerprint,
                trainer_records.Law.as_in(manifest),
            )
            seq = await self._write(renewed)
            manifest, known = renewed, None
        if known is None:
            await self._write(trainer_records.outcome(self.config, manifest, seq, result, 0.0))
        self._hash = result.state_hash
        await self.event("step_again", f"step {manifest.step} after a restart", step=manifest.step)
        return result.learning_rate

    def _taken(self, machine: Machine) -> int:
        """Closings that are in batches already."""
        return machine.version * self.groups_per_step

    async def _collect(self, taken: int) -> None:
        """Follow the closings and fetch their records ahead of the step."""
        place = 0
        async for received in self.bus.follow("HR_SCORE", CLOSE.where(run=self.run)):
            closed = received.message
            if isinstance(closed, StalenessBound):  # before the first closing of a batch that it holds for
                known = self._bounds
                wanted = known.changed(closed.first_batch, closed.bound) if known else Bounds.constant(closed.bound)
                self._bounds = wanted
            if not isinstance(closed, GroupClosed):
                continue
            if place >= taken:
                group = trainer_records.batch_group(received.seq, closed)
                await self._ready.put(Ready(group, await fetch(self.bus, [group])))
            place += 1

    async def _next(self, machine: Machine) -> None:
        """One batch: wait for it, say what it is, take the step, say what came out."""
        k = self._step
        self.status = f"waiting for batch {k}"
        started = time.monotonic()
        batch: list[Ready] = []
        with self.waiting():
            while len(batch) < self.groups_per_step:
                batch.append(await self._ready.get())
        waited = time.monotonic() - started
        self.status = f"step {k}"
        law = trainer_records.Law.of(self._bounds, k) if self._bounds is not None else None
        seq, manifest = await self._announce(machine, 0, tuple(ready.group for ready in batch), law)
        trajectories = {seq: record for ready in batch for seq, record in ready.records[0].items()}
        scores = {seq: record for ready in batch for seq, record in ready.records[1].items()}
        result = await self._take(machine, manifest, (trajectories, scores))
        record = trainer_records.outcome(self.config, manifest, seq, result, waited)
        await self._write(record)
        self._hash, self._step = result.state_hash, k + 1
        if isinstance(record, StepFailed):
            await self.event("step_failed", f"step {k}: {record.reason}: {record.detail}", "error", step=k)
        for engine in result.engines:
            tracing.here().event("engine_mismatch", step=k, **msgspec.structs.asdict(engine))
        if result.alarm:
            await self.event("mismatch", f"step {k}: {result.alarm}", "warning", step=k)
        await self._publish(machine, result.learning_rate)
        await self._keep(machine, manifest)

    async def _announce(
        self, machine: Machine, incarnation: int, groups: Sequence[BatchGroup], law: trainer_records.Law | None
    ) -> tuple[int, StepManifest]:
        """Write the manifest of the next step; its sequence."""
        manifest = trainer_records.manifest(
            self.config,
            self.run,
            machine.version,
            incarnation,
            self._hash,
            tuple(groups),
            machine.numerics.fingerprint,
            law,
        )
        return await self._write(manifest), manifest

    async def _write(self, record: StepManifest | StepDone | StepFailed) -> int:
        """On top of the last record of the run's steps, or not at all."""
        self._step_seq = await self.bus.publish(
            STEP.at(run=self.run),
            record,
            msg_id=f"{self.run}.{record.type_name}.{record.step}.{record.incarnation}",
            expect=self._step_seq,
        )
        return self._step_seq

    async def _take(self, machine: Machine, manifest: StepManifest, records: Records) -> StepOutcome:
        """The step itself. What raises inside becomes a failed step, as long as the bytes are the old ones."""
        machine.config = under(self.config, manifest)
        try:
            return await self._in_thread(lambda: machine.step(manifest, *records))
        except Exception as error:
            if machine.version != manifest.version or await self._in_thread(machine.state.hash) != self._hash:
                raise  # half a step: only the checkpoint knows the old bytes
            text = f"{type(error).__name__}: {error}"

            def give_up() -> StepOutcome:
                machine.kept[machine.version] = copy.deepcopy(machine.state.model)  # Law 5: it may have written tokens
                return refuse(machine.state, "exception", text)

            return await self._in_thread(give_up)

    async def _publish(self, machine: Machine, learning_rate: float) -> None:
        """Write the version's file and tell the sender."""
        path, size = await self._in_thread(lambda: self.shelf.publish(machine.version, self._hash))
        ready = SnapshotReady(
            run=self.run,
            version=machine.version,
            path=str(path),
            state_hash=self._hash,
            bytes=size,
            learning_rate=learning_rate,
        )
        await self.publish_event(ready, msg_id=f"{self.run}.snapshot.{machine.version}.{self._hash}")

    async def _keep(self, machine: Machine, manifest: StepManifest) -> None:
        """A checkpoint now and then; what lies further back than is to be replayed goes."""
        last = machine.version >= self.config.curriculum.steps
        if machine.version % self.config.trainer.checkpoint_every and not last:
            return
        position = {"close_seq": manifest.groups[-1].close_seq, "step_seq": self._step_seq}
        await self._in_thread(lambda: self.shelf.checkpoint(position))
        await self.event("checkpoint", f"version {machine.version}", version=machine.version)
        purged = await self.shelf.purge(self.bus, self.run)
        if purged:
            await self.event("purged", f"{purged} messages of steps that are no longer kept", messages=purged)

    async def _forget_weights(self) -> None:
        """Old chains of versions go when anchors are laid. Nothing waits for it: what fails is done the next time."""
        section = self.config.weights
        trust = Trust.load(self.bus.credentials, section.publishers, unsigned=section.unsigned)

        async def purge(subject: str) -> int:
            return await self.bus.purge(chain.STREAM, subject=subject)

        while True:
            try:
                async for gone in collect.follow(self.bus, purge, self.run, chains=section.collect_chains, trust=trust):
                    text = f"versions {min(gone)} to {max(gone)}: {sum(gone.values())} messages"
                    await self.event("weights_collected", text, versions=len(gone), messages=sum(gone.values()))
            except (BusError, WeightError) as error:
                await self.event("weights_not_collected", str(error), "warning")
                await asyncio.sleep(AGAIN_S)

    async def _measure(self) -> None:
        progress = self._progress
        if progress is not None and (self.machine is None or self.machine.version == 0):
            await self.metric(mid_training_tokens=progress.tokens, mid_training_loss=progress.loss)
        if self.machine is not None:
            await self.metric(version=self.machine.version, groups_ready=self._ready.qsize())
