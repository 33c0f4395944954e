"""The trainer: makes batches from the closings, in their order, and a version from each batch.

With P groups per step, batch k is the GroupClosed records kP to kP + P - 1 of the run. Its step turns version k into
version k + 1. A manifest names everything that a step depends on. It is written before the step with an expected
sequence, so the broker refuses a trainer that was replaced. A trainer that restarts runs published manifests again
before it takes a new batch. Records are fetched while the previous step runs, and steps run in a worker thread.

Files: <run>/snapshots/v<version>.safetensors, immutable, the newest bound + 1 of them; <run>/checkpoints/.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from headrace.actors.trainer import base_policy, initial_policy, old_weights, other_ranks, raised, records, resume
from headrace.actors.trainer.checkpoint_store import CheckpointStore
from headrace.actors.trainer.closings import Batch, Closings, Ready
from headrace.actors.trainer.records import StalenessWindow
from headrace.actors.trainer.turn import Promise, Turn
from headrace.bus.errors import Unrecoverable
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.messages.ledger import Fence
from headrace.messages.plugins import Plugin
from headrace.messages.subjects import STEP
from headrace.messages.training import BatchGroup, SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.policy.config import CheckpointError
from headrace.registry import merged
from headrace.rendering.base import RendererError
from headrace.replay.fetching import Records, fetch
from headrace.replay.recipe import under
from headrace.training import checkpoint, opening
from headrace.training.data.base import DataError
from headrace.training.device import TrainerError
from headrace.training.gradient import nothing
from headrace.training.mid_training import Progress
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.interface import GivenUp, GroupError
from headrace.training.served.publication import Publication
from headrace.training.trainer import PolicyTrainer

T = TypeVar("T")


class Stopped(GivenUp):
    """Ends mid-training, or the wait for other nodes, early; raised inside the worker thread."""


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
        self.trainer: PolicyTrainer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._progress: Progress | None = None
        self._held_out: float | None = None
        """Newest loss on held-out documents of mid-training, the mean over its sources."""
        self._stopping = False
        self.closings = Closings(self.bus, self.run, self.config.curriculum.groups_per_step)
        self._raised = raised.Row()
        self._turn: Turn | None = None
        """The newest step that has begun."""
        self._open: set[asyncio.Task[None]] = set()
        """The steps whose version is not yet announced."""
        self.spawn(self.until_superseded(self._live), "training")
        self.every(1.0, self._measure, "metrics")

    async def stop(self) -> None:
        """Let the current step end and announce the version of a taken one; mid-training ends at its next report."""
        self._stopping = True
        try:
            several = self.config.trainer.ranks > 1
            announces = not (several and self.failed.done()) and (self._turn is None or self._turn.updated.is_set())
            if self._open and announces:  # a lost group can announce nothing
                await asyncio.wait(self._open)
            if self.trainer is not None and several:
                await other_ranks.close(self, self.trainer, self._in_thread(self.trainer.close))
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        trainer = await self._prepare()
        if self.config.trainer.ranks > 1:
            self.spawn(other_ranks.watch(self, trainer), "ranks")
        await self._catch_up(trainer)
        self.spawn(self.closings.follow(trainer.version, trainer.expect), "collecting")
        if self.config.weights.collect_chains:
            self.spawn(old_weights.forget(self), "old weights")
        try:
            async with asyncio.TaskGroup() as steps:
                while True:
                    await self._next(trainer, steps)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one ended the others

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _prepare(self) -> PolicyTrainer:
        """Write a fence, so that earlier trainers are refused; then resume from the checkpoint, or make version 0."""
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), fence)
        folder = self.folder / "checkpoints"
        await resume.choose(self, folder)
        if not (folder / "checkpoint.safetensors").exists():
            await self.event("phase", "mid-training")
        self.status = "preparing"

        base = await base_policy.fetch(self.bus, self.config, self.run, self.folder)
        waits = other_ranks.Waits(self, self._end_if_stopped)

        def work() -> PolicyTrainer:
            return opening.prepare(
                self.config,
                folder,
                tokenizer_json=bundle.tokenizer_json,
                traces=lambda: initial_policy.mid_training(self.config, bundle, self._end_if_stopped),
                progress=self._on_progress,
                base=base.file if base is not None else None,
                waiting=waits,
                started=waits.started,
            )

        try:
            bundle = await self._in_thread(lambda: initial_policy.bundle(self.config, self.folder))
            await renderer_bundles.publish(self.bus, self.run, bundle)
            self.trainer = trainer = await waits.opened(self._in_thread(work))
        except GroupError as error:
            raise error.during("the trainer was not prepared") from error
        except checkpoint.Damaged as error:
            await resume.replace(self, folder, error)
            raise  # a restart opens the other one
        except (
            CheckpointError,
            checkpoint.UnusableCheckpoint,
            DataError,
            RendererError,
            TrainerError,
        ) as error:  # a restart finds the same
            raise Unrecoverable(f"{type(error).__name__}: {error}") from error
        if base is not None and trainer.version == 0:
            base.check(await self._in_thread(trainer.state.hash))
        self.store = CheckpointStore(self.folder, trainer, self.config)
        await initial_policy.tell(self, self.folder, trainer)
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
                outcomes[message.step] = self._raised.seen(message)
        self._hash = await self._in_thread(trainer.state.hash)
        rate = 0.0
        while trainer.version in manifests:
            seq, manifest = manifests[trainer.version]
            recorded = outcomes.get(manifest.step)
            if recorded is not None and recorded.incarnation != manifest.incarnation:
                recorded = None  # the newest manifest of this step has no outcome
            rate = await self._again(trainer, seq, manifest, recorded)
        with trainer.clock.spent("publish"):
            publication = await self._in_thread(lambda: self.store.publish(self._hash))
            await self._publish(trainer, publication, trainer.version, rate)

    async def _again(
        self, trainer: PolicyTrainer, seq: int, manifest: StepManifest, recorded: StepDone | StepFailed | None
    ) -> float:
        """Repeat the step of a manifest. Returns its learning rate. recorded: the published outcome; a result with
        other bits is published as a new incarnation of the step."""
        fetched = await fetch(self.bus, manifest.groups)
        if manifest.base_hash != self._hash or (recorded is None and manifest.layout != trainer.layout):
            window = StalenessWindow.as_in(manifest)
            plan = await self._plan(trainer, manifest.groups, window, fetched)
            plan = plan._replace(base_hash=self._hash, incarnation=manifest.incarnation + 1)
            manifest = records.manifest(self.config, self.run, plan)
            seq, recorded = await self._write(manifest), None
        if detail := raised.given_up(recorded):
            trainer.config = under(self.config, manifest)
            result = await self._in_thread(lambda: trainer.give_up(raised.REASON, detail))
        else:
            recorder = raised.Recorder(
                self, self._write, Promise((seq, manifest)).wait, trainer.clock.lap, recorded is not None
            )
            result = await recorder.watched(self._take(trainer, manifest, fetched))
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
                trainer.layout,
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

    async def _next(self, trainer: PolicyTrainer, steps: asyncio.TaskGroup) -> None:
        """Wait for one batch and take its step. Its outcome and its version are written behind the next step."""
        k = trainer.version
        self.status = f"waiting for batch {k}"
        ready: list[Ready] = []
        groups = self.closings.groups_per_step
        told = self.waiting(lambda: f"batch {k}: {len(ready)} of {groups} groups are closed")
        self.closings.hold()
        with told, trainer.clock.spent("batch"):
            while len(ready) < groups or self._stopping:
                ready.append(await self.closings.ready.get())
        self.status = f"step {k}"
        self._turn = turn = Turn(k, self._turn, self._hash)
        batch = Batch.of(ready)
        task = steps.create_task(self._step_batch(trainer, batch, turn, steps), name=f"{self.id}: step {k}")
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        await turn.updated.wait()  # a step that fails cancels this wait
        await self._keep(trainer, turn, batch.groups[-1].close_seq)

    async def _step_batch(self, trainer: PolicyTrainer, batch: Batch, turn: Turn, steps: asyncio.TaskGroup) -> None:
        """One step in a trace of its own, with a link to each trajectory's span."""
        attributes: dict[str, str | int] = {"hr.run": self.run, "hr.step": turn.step}
        try:
            with tracing.span("train step", root=True, links=batch.links, attributes=attributes) as span:
                await self._run_step(trainer, batch, turn, span, steps)
        except BaseException as error:
            turn.fail(error)
            raise

    async def _run_step(
        self, trainer: PolicyTrainer, batch: Batch, turn: Turn, span: tracing.Span, steps: asyncio.TaskGroup
    ) -> None:
        """Take the step of a batch; publish its manifest, its outcome and its version."""
        k, window = turn.step, self.closings.window(turn.step)
        plan = await self._plan(trainer, batch.groups, window, batch.records)
        steps.create_task(self._announce(turn, plan), name=f"{self.id}: manifest {k}")
        manifest = records.manifest(self.config, self.run, plan)
        recorder = raised.Recorder(self, self._write, turn.announced.wait, trainer.clock.lap)
        result = await recorder.watched(self._take(trainer, manifest, batch.records, turn))
        self.closings.resume()
        publication = await self._in_thread(self.store.publish)
        lap = trainer.clock.lap()
        turn.updated.set()
        seq, manifest = await turn.announced.wait()
        state_hash = await self._of_publication(trainer, publication.hashed)
        await turn.announced_before.wait()
        result = msgspec.structs.replace(result, state_hash=state_hash)
        span.set(**{"hr.version": result.version})
        record = records.outcome(self.config, manifest, seq, result, lap, batch.records[0].values())
        await self._write(record)
        self._hash = state_hash
        turn.recorded.set_result(state_hash)
        trace = span.context.trace_id
        if isinstance(record, StepFailed):
            await self.event("step_failed", raised.sentence(record), "error", step=k, trace=trace)
        for engine in result.engines:
            span.event("engine_mismatch", step=k, **msgspec.structs.asdict(engine))
        if result.alarm:
            await self.event("mismatch", f"step {k}: {result.alarm}", "warning", step=k, trace=trace)
        await self._publish(trainer, publication, result.version, result.learning_rate)
        if gaps := records.token_gaps(manifest, result):
            await self.publish_event(gaps, msg_id=f"{self.run}.gaps.{k}.{manifest.incarnation}")
        turn.ended.set_result(True)

    async def _announce(self, turn: Turn, plan: records.StepPlan) -> None:
        """Write the manifest of a step, on top of the outcome of the step before."""
        try:
            manifest = records.manifest(self.config, self.run, plan._replace(base_hash=await turn.base.wait()))
            turn.announced.set_result((await self._write(manifest), manifest))
        except BaseException as error:
            turn.fail(error)
            raise

    async def _plan(
        self, trainer: PolicyTrainer, groups: Sequence[BatchGroup], window: StalenessWindow | None, fetched: Records
    ) -> records.StepPlan:
        """The plan of the next step, without the hash of the version that it updates."""
        fingerprint, plugins = trainer.numerics.fingerprint, await self._plugins_behind(fetched)
        return records.StepPlan(trainer.version, "", tuple(groups), fingerprint, window, 0, plugins, trainer.layout)

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
        """Publish on top of the last record of the run's steps. Returns the sequence. WrongSequence when replaced,
        Unrecoverable when the step was one too many that raised."""
        name = f"{self.run}.{record.type_name}.{record.step}.{record.incarnation}"
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), record, msg_id=name, expect=self._step_seq)
        self._raised.check(record)
        return self._step_seq

    async def _take(
        self, trainer: PolicyTrainer, manifest: StepManifest, fetched: Records, turn: Turn | None = None
    ) -> StepOutcome:
        """Take a step. An exception becomes a failed step if the weights still have the old bytes. turn: of a step
        whose manifest is not yet on the bus; the outcome then has no state hash."""
        if detail := resume.beyond(manifest.step, fetched[0].values()):
            return await self._in_thread(lambda: trainer.give_up(resume.REASON, detail, hashed=turn is None))
        trainer.config = under(self.config, manifest)
        before_update = partial(turn.wait, trainer.clock) if turn is not None else nothing
        try:
            with trainer.clock.spent("busy"):
                hashed, begun = turn is None, self.closings.resume
                return await self._in_thread(lambda: trainer.step(manifest, *fetched, before_update, hashed, begun))
        except Exception as error:
            if turn is not None:
                _, manifest = await turn.announced.wait()
            if isinstance(error, TrainerError):  # this node may not take the step at all
                raise Unrecoverable(f"TrainerError: {error}") from error
            if isinstance(error, GroupError):
                raise  # its group of processes has ended
            if trainer.version != manifest.version or await self._in_thread(trainer.state.hash) != manifest.base_hash:
                raise  # the step was interrupted halfway: only the checkpoint has the old bytes
            self.log.exception("step_exception", text=(text := f"{type(error).__name__}: {error}"))
            return await self._in_thread(lambda: trainer.give_up(raised.REASON, text, hashed=turn is None))

    async def _of_publication(self, trainer: PolicyTrainer, result: "Future[T]") -> T:
        """A result of a publication, or the error that explains why there is none."""
        try:
            return await asyncio.wrap_future(result)
        except Exception as error:
            raise await asyncio.to_thread(trainer.explained, error) from error

    async def _publish(
        self, trainer: PolicyTrainer, publication: Publication, version: int, learning_rate: float
    ) -> None:
        """Announce a version to the sender when its file is durable."""
        path = await self._of_publication(trainer, publication.durable)
        state_hash = publication.hashed.result()
        ready = SnapshotReady(
            run=self.run,
            version=version,
            path=str(path),
            state_hash=state_hash,
            bytes=path.stat().st_size,
            learning_rate=learning_rate,
            written_s=publication.seconds.get("durable", 0.0),
        )
        # Every life announces its newest version: the sender may have found the file gone, and the broker older.
        await self.publish_event(ready, msg_id=f"{self.run}.snapshot.{version}.{state_hash}.{self.id}")
        self.store.forget(version)

    async def _keep(self, trainer: PolicyTrainer, turn: Turn, close_seq: int) -> None:
        """At the checkpoint interval, write a checkpoint and purge records of steps that are not kept for replay."""
        last = trainer.version >= self.config.curriculum.steps
        if trainer.version % self.config.trainer.checkpoint_every and not last:
            return
        with trainer.clock.spent("publish"):
            await turn.recorded.wait()
        with trainer.clock.spent("checkpoint"):
            position = {"close_seq": close_seq, "step_seq": self._step_seq}
            await self._in_thread(lambda: self.store.checkpoint(position))
        await self.event("checkpoint", f"version {trainer.version}", version=trainer.version)
        if (old := await self.store.old_records(self.bus, self.run)) is not None:
            self._step_seq = await self.bus.publish(STEP.at(run=self.run), old, expect=self._step_seq)
            purged = await self.store.purge(self.bus, old)
            await self.event("purged", f"{purged} messages of steps that are no longer kept", messages=purged)

    async def _measure(self) -> None:
        progress = self._progress
        if progress is not None and (self.trainer is None or self.trainer.version == 0):
            await self.metric(**initial_policy.figures(progress, self._held_out))
        if self.trainer is not None:
            await self.metric(version=self.trainer.version, groups_ready=self.closings.ready.qsize())
