"""The trainer: makes batches from the closings, in their order, and a version from each batch.

With P groups per step, batch k is the GroupClosed records kP to kP + P - 1 of the run. Its step turns version k into
version k + 1. A manifest names everything that a step depends on. It is written before the step with an expected
sequence, so the broker refuses a trainer that was replaced. A trainer that restarts runs published manifests again
before it takes a new batch. Records are fetched while the previous step runs, and steps run in a worker thread.

Files: <run>/snapshots/v<version>.safetensors, immutable, the newest bound + 1 of them; <run>/checkpoints/.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from headrace.actors.trainer import base_policy, initial_policy, records
from headrace.actors.trainer.checkpoint_store import CheckpointStore
from headrace.actors.trainer.records import StalenessWindow
from headrace.algorithms.staleness import Bounds
from headrace.bus.errors import BusError, Unrecoverable
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.bus.runtime.tracing import Link
from headrace.messages.ledger import Fence, GroupClosed, StalenessBound
from headrace.messages.plugins import Plugin
from headrace.messages.subjects import CLOSE, STEP
from headrace.messages.training import BatchGroup, SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.policy.config import CheckpointError
from headrace.registry import merged
from headrace.rendering.base import RendererError
from headrace.replay.fetching import Records, fetch
from headrace.replay.recipe import under
from headrace.training import opening
from headrace.training.data.base import DataError
from headrace.training.mid_training import Progress
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.interface import GroupError
from headrace.training.trainer import PolicyTrainer, TrainerError
from headrace.weights import chain
from headrace.weights.publishing import collect
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

T = TypeVar("T")
AGAIN_S = 30.0
"""Seconds until a failed collection of old weights is tried again."""


class Stopped(Exception):
    """Ends mid-training early; raised inside the worker thread."""


class Ready(NamedTuple):
    """A closed group with its records."""

    group: BatchGroup
    records: Records
    links: tuple[Link, ...]
    """Links to the spans that published its trajectories."""


class Trainer(Actor):
    """GroupClosed, Trajectory, Score in; StepManifest, StepDone, StepFailed, SnapshotReady out."""

    role: ClassVar[str] = "trainer"

    async def start(self) -> None:
        """Prepare in the background, because mid-training may take minutes. Unrecoverable for an unknown plugin."""
        try:
            used = initial_policy.plugins_used(self.config)
        except TrainerError as error:
            raise Unrecoverable(f"TrainerError: {error}") from error
        await agree(self.bus, self.run, used)
        self._agreed = set(used)
        self.folder = Path(self.config.run.dir) / self.run
        self.groups_per_step = self.config.curriculum.groups_per_step
        self.trainer: PolicyTrainer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._progress: Progress | None = None
        self._held_out: float | None = None
        """Newest loss on held-out documents of mid-training, the mean over its sources."""
        self._stopping = False
        self._bounds: Bounds | None = None
        """The staleness bound of every batch, read from the closings."""
        self._ready: asyncio.Queue[Ready] = asyncio.Queue(2 * self.groups_per_step)
        self.spawn(self.until_superseded(self._live), "training")
        self.every(1.0, self._measure, "metrics")

    async def stop(self) -> None:
        """Let the current step end; mid-training ends at its next report."""
        self._stopping = True
        try:
            if self.trainer is not None and self.config.trainer.ranks > 1:
                await self._in_thread(self.trainer.close)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        trainer = await self._prepare()
        await self._catch_up(trainer)
        self.spawn(self._collect(self._taken(trainer)), "collecting")
        if self.config.trainer.ranks > 1:
            self.spawn(self._watch(trainer), "ranks")
        if self.config.weights.collect_chains:
            self.spawn(self._forget_weights(), "old weights")
        while True:
            await self._next(trainer)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _prepare(self) -> PolicyTrainer:
        """Write a fence, so that earlier trainers are refused; then resume from the checkpoint, or make version 0."""
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), fence)
        folder = self.folder / "checkpoints"
        if not (folder / "checkpoint.safetensors").exists():
            await self.event("phase", "mid-training")
        self.status = "preparing"

        base = await base_policy.fetch(self.bus, self.config, self.run, self.folder)

        def work() -> PolicyTrainer:
            return opening.prepare(
                self.config,
                folder,
                tokenizer_json=bundle.tokenizer_json,
                traces=lambda: initial_policy.mid_training(self.config, bundle, self._end_if_stopped),
                progress=self._on_progress,
                base=base.file if base is not None else None,
            )

        try:
            bundle = await self._in_thread(lambda: initial_policy.bundle(self.config, self.folder))
            await renderer_bundles.publish(self.bus, self.run, bundle)
            self.trainer = trainer = await self._in_thread(work)
        except GroupError as error:
            raise GroupError(f"the trainer's group did not start: {error}") from error
        except (CheckpointError, DataError, RendererError) as error:  # a restart reads the same files
            raise Unrecoverable(f"{type(error).__name__}: {error}") from error
        if base is not None and trainer.version == 0:
            base.check(await self._in_thread(trainer.state.hash))
        self.store = CheckpointStore(self.folder, trainer, self.config)
        for source, losses in initial_policy.held_out(self.folder).items():
            told = ", ".join(f"{name} mid-training {loss:.4f}" for name, loss in losses.items())
            await self.event("held_out_loss", f"{source}: {told} nats", "info", source=source, **losses)
        await self.event("prepared", f"version {trainer.version}", version=trainer.version, resumed=trainer.resumed)
        return trainer

    def _end_if_stopped(self) -> None:
        """Raise Stopped when the actor stops. Runs in the worker thread."""
        if self._stopping:
            raise Stopped

    def _on_progress(self, progress: Progress) -> None:
        """Record progress; raise Stopped when the actor stops. Runs in the worker thread."""
        self._progress = progress
        if progress.held_out:
            initial_policy.record(self.folder, progress)
            self._held_out = sum(progress.held_out.values()) / len(progress.held_out)
        self._end_if_stopped()

    async def _catch_up(self, trainer: PolicyTrainer) -> None:
        """Repeat the steps that were published after the checkpoint, then publish the resulting version."""
        manifests: dict[int, tuple[int, StepManifest]] = {}
        outcomes: dict[int, StepDone | StepFailed] = {}
        async for received in self.bus.history("HR_STEP", STEP.at(run=self.run)):
            message = received.message
            if isinstance(message, StepManifest):
                manifests[message.step] = (received.seq, message)
            elif isinstance(message, StepDone | StepFailed):
                outcomes[message.step] = message
        self._hash = await self._in_thread(trainer.state.hash)
        rate = 0.0
        while trainer.version in manifests:
            seq, manifest = manifests[trainer.version]
            recorded = outcomes.get(manifest.step)
            if recorded is not None and recorded.incarnation != manifest.incarnation:
                recorded = None  # the newest manifest of this step has no outcome
            rate = await self._again(trainer, seq, manifest, recorded)
        self._step = trainer.version
        await self._publish(trainer, rate)

    async def _again(
        self, trainer: PolicyTrainer, seq: int, manifest: StepManifest, recorded: StepDone | StepFailed | None
    ) -> float:
        """Repeat the step of a manifest. Returns its learning rate. recorded: the published outcome; a result with
        other bits is published as a new incarnation of the step."""
        fetched = await fetch(self.bus, manifest.groups)
        if manifest.base_hash != self._hash:
            window = StalenessWindow.as_in(manifest)
            seq, manifest = await self._announce(trainer, manifest.incarnation + 1, manifest.groups, window, fetched)
            recorded = None
        result = await self._take(trainer, manifest, fetched)
        if recorded is not None and recorded.state_hash != result.state_hash:
            text = f"step {manifest.step} gave {result.state_hash}, its published result was {recorded.state_hash}"
            await self.event("new_incarnation", text, "warning", step=manifest.step)
            plan = records.StepPlan(
                manifest.step,
                manifest.base_hash,
                manifest.groups,
                trainer.numerics.fingerprint,
                StalenessWindow.as_in(manifest),
                manifest.incarnation + 1,
                await self._plugins_behind(fetched),
            )
            renewed = records.manifest(self.config, self.run, plan)
            seq = await self._write(renewed)
            manifest, recorded = renewed, None
        if recorded is None:
            lap = trainer.clock.lap()
            await self._write(records.outcome(self.config, manifest, seq, result, lap, fetched[0].values()))
        self._hash = result.state_hash
        await self.event("step_again", f"step {manifest.step} after a restart", step=manifest.step)
        return result.learning_rate

    def _taken(self, trainer: PolicyTrainer) -> int:
        """Number of closings that are in finished batches."""
        return trainer.version * self.groups_per_step

    async def _collect(self, taken: int) -> None:
        """Follow the closings and fetch their records ahead of the step."""
        position = 0
        async for received in self.bus.follow("HR_SCORE", CLOSE.where(run=self.run)):
            closed = received.message
            if isinstance(closed, StalenessBound):  # it precedes the closings of the first batch that it applies to
                bounds = self._bounds
                self._bounds = (
                    bounds.changed(closed.first_batch, closed.bound) if bounds else Bounds.constant(closed.bound)
                )
            if not isinstance(closed, GroupClosed):
                continue
            if position >= taken:
                group = records.batch_group(received.seq, closed)
                links: list[Link] = []
                fetched = await fetch(self.bus, [group], links)
                await self._ready.put(Ready(group, fetched, tuple(links)))
            position += 1

    async def _next(self, trainer: PolicyTrainer) -> None:
        """Wait for one batch, then take its step in a trace of its own, with a link to each trajectory's span."""
        k = self._step
        self.status = f"waiting for batch {k}"
        batch: list[Ready] = []
        told = self.waiting(lambda: f"batch {k}: {len(batch)} of {self.groups_per_step} groups are closed")
        with told, trainer.clock.spent("batch"):
            while len(batch) < self.groups_per_step:
                batch.append(await self._ready.get())
        self.status = f"step {k}"
        links = [link for ready in batch for link in ready.links]
        attributes: dict[str, str | int] = {"hr.run": self.run, "hr.step": k}
        with tracing.span("train step", root=True, links=links, attributes=attributes) as span:
            await self._step_batch(trainer, batch, span)

    async def _step_batch(self, trainer: PolicyTrainer, batch: Sequence[Ready], span: tracing.Span) -> None:
        """Publish the manifest of a batch, take its step, publish the outcome and the version."""
        k = self._step
        window = StalenessWindow.of(self._bounds, k) if self._bounds is not None else None
        trajectories = {seq: record for ready in batch for seq, record in ready.records[0].items()}
        scores = {seq: record for ready in batch for seq, record in ready.records[1].items()}
        fetched = trajectories, scores
        seq, manifest = await self._announce(trainer, 0, tuple(ready.group for ready in batch), window, fetched)
        result = await self._take(trainer, manifest, fetched)
        lap = trainer.clock.lap()
        record = records.outcome(self.config, manifest, seq, result, lap, trajectories.values())
        await self._write(record)
        self._hash, self._step = result.state_hash, k + 1
        trace = span.context.trace_id
        if isinstance(record, StepFailed):
            text = f"step {k}: {record.reason}: {record.detail}"
            await self.event("step_failed", text, "error", step=k, trace=trace)
        for engine in result.engines:
            span.event("engine_mismatch", step=k, **msgspec.structs.asdict(engine))
        if result.alarm:
            await self.event("mismatch", f"step {k}: {result.alarm}", "warning", step=k, trace=trace)
        await self._publish(trainer, result.learning_rate)
        await self._keep(trainer, manifest)

    async def _announce(
        self,
        trainer: PolicyTrainer,
        incarnation: int,
        groups: Sequence[BatchGroup],
        window: StalenessWindow | None,
        fetched: Records,
    ) -> tuple[int, StepManifest]:
        """Write the manifest of the next step. Returns its sequence and the manifest."""
        plan = records.StepPlan(
            trainer.version,
            self._hash,
            tuple(groups),
            trainer.numerics.fingerprint,
            window,
            incarnation,
            await self._plugins_behind(fetched),
        )
        manifest = records.manifest(self.config, self.run, plan)
        return await self._write(manifest), manifest

    async def _plugins_behind(self, fetched: Records) -> tuple[Plugin, ...]:
        """The plugins that a batch's records name. Unrecoverable when one has another source hash than the run's."""
        trajectories, scores = fetched
        used = merged(
            *(trajectory.plugins for trajectory in trajectories.values()), *(score.plugins for score in scores.values())
        )
        await agree(self.bus, self.run, [plugin for plugin in used if plugin not in self._agreed])
        self._agreed.update(used)
        return used

    async def _write(self, record: StepManifest | StepDone | StepFailed) -> int:
        """Publish on top of the last record of the run's steps. Returns the sequence. WrongSequence when replaced."""
        self._step_seq = await self.bus.publish(
            STEP.at(run=self.run),
            record,
            msg_id=f"{self.run}.{record.type_name}.{record.step}.{record.incarnation}",
            expect=self._step_seq,
        )
        return self._step_seq

    async def _take(self, trainer: PolicyTrainer, manifest: StepManifest, records: Records) -> StepOutcome:
        """Take a step. An exception becomes a failed step if the weights still have the old bytes."""
        trainer.config = under(self.config, manifest)
        try:
            with trainer.clock.spent("busy"):
                return await self._in_thread(lambda: trainer.step(manifest, *records))
        except (TrainerError, GroupError):
            raise  # this node may not take the step at all, or its group of processes has ended
        except Exception as error:
            if trainer.version != manifest.version or await self._in_thread(trainer.state.hash) != self._hash:
                raise  # the step was interrupted halfway: only the checkpoint has the old bytes
            text = f"{type(error).__name__}: {error}"

            return await self._in_thread(lambda: trainer.give_up("exception", text))

    async def _publish(self, trainer: PolicyTrainer, learning_rate: float) -> None:
        """Write the version's file and announce it to the sender."""
        with trainer.clock.spent("publish"):
            path, size = await self._in_thread(lambda: self.store.publish(trainer.version, self._hash))
        ready = SnapshotReady(
            run=self.run,
            version=trainer.version,
            path=str(path),
            state_hash=self._hash,
            bytes=size,
            learning_rate=learning_rate,
        )
        await self.publish_event(ready, msg_id=f"{self.run}.snapshot.{trainer.version}.{self._hash}")

    async def _keep(self, trainer: PolicyTrainer, manifest: StepManifest) -> None:
        """At the checkpoint interval, write a checkpoint and purge records of steps that are not kept for replay."""
        last = trainer.version >= self.config.curriculum.steps
        if trainer.version % self.config.trainer.checkpoint_every and not last:
            return
        position = {"close_seq": manifest.groups[-1].close_seq, "step_seq": self._step_seq}
        with trainer.clock.spent("checkpoint"):
            await self._in_thread(lambda: self.store.checkpoint(position))
        await self.event("checkpoint", f"version {trainer.version}", version=trainer.version)
        purged = await self.store.purge(self.bus, self.run)
        if purged:
            await self.event("purged", f"{purged} messages of steps that are no longer kept", messages=purged)

    async def _forget_weights(self) -> None:
        """Remove old chains of versions when full snapshots are published. A failed removal is repeated after
        `AGAIN_S`."""
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

    async def _watch(self, trainer: PolicyTrainer) -> None:
        """End this actor when a rank has ended, even between two steps; its successor starts all ranks again."""
        while not trainer.lost:
            await asyncio.sleep(0.2)
        raise GroupError(trainer.lost)

    async def _measure(self) -> None:
        progress = self._progress
        if progress is not None and (self.trainer is None or self.trainer.version == 0):
            await self.metric(mid_training_tokens=progress.tokens)
            if progress.step:
                await self.metric(mid_training_loss=progress.loss)
            if self._held_out is not None:
                await self.metric(mid_training_held_out_loss=self._held_out)
        if self.trainer is not None:
            await self.metric(version=self.trainer.version, groups_ready=self._ready.qsize())
