"""The trainer: makes batches from the closings, in their order, and a version from each batch.

With P groups per step, batch k is the GroupClosed records kP to kP + P - 1 of the run. Its step turns version k into
version k + 1 (`_step`). A manifest names everything that a step depends on. It is written before the update with an
expected sequence, so the broker refuses a trainer that was replaced. A trainer that restarts takes the steps of
published manifests again before it takes a new batch. Records are fetched while the previous step runs.

In HR_STEP the outcome of step k precedes the manifest of step k + 1. The step itself runs in a worker thread.
It computes its gradient while the version before it is still copied and hashed; its update waits until its manifest,
which names that hash, is on the bus. So a kill at any moment loses only what a published manifest repeats.

Files: <run>/snapshots/v<version>.safetensors, immutable, the newest two; <run>/checkpoints/.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from headrace.actors.trainer import base_policy, initial_policy, old_weights, other_ranks, raised, records, resume
from headrace.actors.trainer.checkpoint_store import CheckpointStore
from headrace.actors.trainer.closings import Batch, Closings, Ready
from headrace.actors.trainer.orders import Orders
from headrace.bus.errors import Unrecoverable
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.messages.ledger import Fence
from headrace.messages.operations import MID_TRAINING
from headrace.messages.subjects import STEP
from headrace.messages.training import SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.policy.config import CheckpointError
from headrace.registry import merged
from headrace.rendering.base import RendererError
from headrace.replay.fetching import Records, fetch
from headrace.replay.recipe import changed, under
from headrace.training import checkpoint, opening
from headrace.training.data.base import DataError
from headrace.training.device import TrainerError
from headrace.training.mid_training import Progress
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.interface import GivenUp, GroupError, StepRaised
from headrace.training.served.publication import Publication
from headrace.training.trainer import PolicyTrainer

T = TypeVar("T")


class Stopped(GivenUp):
    """Ends mid-training, or the wait for other nodes, early; raised inside the worker thread."""


class OnRecord(NamedTuple):
    """What HR_STEP holds of a step."""

    seq: int
    """Of the manifest."""
    manifest: StepManifest
    outcome: StepDone | StepFailed | None = None
    """Of this incarnation of the step."""


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
        self._row = raised.Row()
        self._orders = Orders(self, self.folder / "checkpoints")
        self._updated = asyncio.Event()
        """Set when no step computes."""
        self._updated.set()
        self._hash = ""
        """State hash of the version whose outcome is the newest on the bus."""
        self._recording = asyncio.Lock()
        """Held from the manifest of a step until its outcome."""
        self._saving = asyncio.Lock()
        """Held while a version's file is made durable: at most one waits for the disk."""
        self._announcing: Future[OnRecord] | None = None
        """The manifest that the newest update waits for."""
        self._open: set[asyncio.Task[None]] = set()
        """The steps whose version is not yet announced."""
        self.spawn(self.until_superseded(self._live), "training")
        self.every(1.0, self._measure, "metrics")

    async def stop(self) -> None:
        """Announce the version of a taken step; a computing one is lost, and mid-training ends at its next report."""
        self._stopping = True
        try:
            several = self.config.trainer.ranks > 1
            announces = self._updated.is_set() and not (several and self.failed.done())
            if self._open and announces:  # a lost group can announce nothing
                await asyncio.wait(self._open)
            if self.trainer is not None and several:
                await other_ranks.close(self, self.trainer, self._in_thread(self.trainer.close))
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        trainer = await self._prepare()
        await self._train(trainer)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _prepare(self) -> PolicyTrainer:
        """Write a fence, so that earlier trainers are refused; then resume from the checkpoint, or make version 0."""
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), fence)
        folder = self.folder / "checkpoints"
        await resume.choose(self, folder)
        if not (folder / "checkpoint.safetensors").exists():
            await self.event("phase", MID_TRAINING)
        self.status = "preparing"

        base = await base_policy.fetch(self.bus, self.config, self.run, self.folder)
        ranks = other_ranks.Watch(self, self._end_if_stopped, lambda: self._in_thread(lambda: None))

        def work() -> PolicyTrainer:
            return opening.prepare(
                self.config,
                folder,
                tokenizer_json=bundle.tokenizer_json,
                traces=lambda: initial_policy.mid_training(self.config, bundle, self._end_if_stopped),
                progress=self._on_progress,
                base=base.file if base is not None else None,
                waiting=ranks.waiting,
                started=ranks.started,
            )

        try:
            bundle = await self._in_thread(lambda: initial_policy.bundle(self.config, self.folder))
            await renderer_bundles.publish(self.bus, self.run, bundle)
            if self.config.trainer.ranks > 1:
                self.spawn(ranks.run(), "ranks")
            self.trainer = ranks.trainer = trainer = await self._in_thread(work)
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
        if live := trainer.state.model.config.live_routers:
            text = f"{live} layers choose experts anew in training: their routers cannot be replayed; see the mismatch"
            await self.event("routes_not_replayed", text, "warning", layers=live)
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

    async def _train(self, trainer: PolicyTrainer) -> None:
        """Make a version of each batch, in order, without end."""
        self._hash = await self._in_thread(trainer.state.hash)
        await self._publish(trainer, await self._in_thread(lambda: self.store.publish(self._hash)), trainer.version)
        earlier = await self._on_record(trainer.version)
        await self._orders.begin()
        self.spawn(self._orders.follow(), "orders")
        self.spawn(self.closings.follow(trainer.version + len(earlier), trainer.expect), "collecting")
        if self.config.weights.collect_chains:
            self.spawn(old_weights.forget(self), "old weights")
        try:
            async with asyncio.TaskGroup() as steps:
                while True:
                    on_record = earlier.pop(trainer.version, None)
                    batch = await self._batch(trainer, on_record)
                    self._updated = updated = asyncio.Event()
                    name = f"{self.id}: step {trainer.version}"
                    step = steps.create_task(self._step(trainer, batch, on_record, updated), name=name)
                    self._open.add(step)
                    step.add_done_callback(self._open.discard)
                    await updated.wait()  # a step that fails cancels this wait
                    await self._keep(trainer, batch)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one ended the others

    async def _on_record(self, first: int) -> dict[int, OnRecord]:
        """The steps on record from number `first` on."""
        steps: dict[int, OnRecord] = {}
        async for received in self.bus.history("HR_STEP", STEP.at(run=self.run)):
            match received.message:
                case StepManifest() as manifest:
                    self._orders.seen(manifest)
                    if manifest.step < first:
                        continue
                    steps[manifest.step] = OnRecord(received.seq, manifest)
                case StepDone() | StepFailed() as outcome:
                    self._row.seen(outcome)
                    if outcome.step in steps:
                        steps[outcome.step] = steps[outcome.step]._replace(outcome=outcome)
        return steps

    async def _batch(self, trainer: PolicyTrainer, on_record: OnRecord | None) -> Batch:
        """The batch of a manifest on record, or of the next closings."""
        k, groups, ready = trainer.version, self.closings.groups_per_step, list[Ready]()
        if on_record is not None:
            named, links = on_record.manifest.groups, list[tracing.Link]()
            return Batch(named, await fetch(self.bus, named, links), links)
        self.status = f"waiting for batch {k}"
        waits = self.waiting(lambda: f"batch {k}: {len(ready)} of {groups} groups are closed")
        self.closings.hold()
        with waits, trainer.clock.spent("batch"):
            while len(ready) < groups or self._stopping:
                ready.append(await self.closings.ready.get())
        return Batch.of(ready)

    async def _step(
        self, trainer: PolicyTrainer, batch: Batch, earlier: OnRecord | None, updated: asyncio.Event
    ) -> None:
        """Version k becomes version k + 1: manifest, update, outcome, version.

        updated: set when the next step may begin; what follows runs beside it. earlier: what an earlier life has
        recorded of the step; it is not written again.
        """
        k = trainer.version
        self.status = f"step {k}"
        attributes: dict[str, str | int] = {"hr.run": self.run, "hr.step": k}
        with tracing.span("train step", root=True, links=batch.links, attributes=attributes) as span:
            # The manifest names the hash of version k, which is still being copied: it is written beside the gradient.
            manifest = await self._manifest(trainer, batch, earlier)
            announce = self._announce(trainer, manifest, earlier)
            self._announcing = announcing = asyncio.run_coroutine_threadsafe(announce, asyncio.get_running_loop())
            try:
                if earlier is not None:  # it may become a new incarnation, without an outcome
                    earlier = await asyncio.wrap_future(announcing)
                    manifest = earlier.manifest
                gave_up = raised.given_up(earlier.outcome) if earlier is not None else ""
                result = await self._compute(trainer, manifest, batch.records, announcing, gave_up)
            except BaseException:
                announcing.cancel()  # the thread does not wait for it any longer
                raise

            # The copy of version k + 1 begins, and with it the next step.
            publication = await self._in_thread(self.store.publish)
            lap = trainer.clock.lap()
            updated.set()

            # The outcome names the hash of the copy.
            state_hash = await self._of_publication(trainer, publication.hashed)
            async with self._saving:
                on_record = await asyncio.wrap_future(announcing)
                if on_record.outcome is not None and on_record.outcome.state_hash != state_hash:
                    text = f"step {k} gave {state_hash}, its published result was {on_record.outcome.state_hash}"
                    await self.event("new_incarnation", text, "warning", step=k)
                    manifest = records.renewed(on_record.manifest, self._hash, trainer)
                    on_record = OnRecord(await self._write(manifest), manifest)
                result = msgspec.structs.replace(result, state_hash=state_hash)
                span.set(**{"hr.version": result.version})
                if on_record.outcome is None:
                    record = records.outcome(self.config, *on_record[:2], result, lap, batch.records[0].values())
                    await self._write(record)
                    await self._tell(record, result, span)
                self._hash = state_hash
                self._recording.release()
                if earlier is not None:
                    await self.event("step_again", f"step {k} after a restart", step=k)

                # The version is announced when its file is durable.
                await self._publish(trainer, publication, result.version, result.learning_rate)

    async def _manifest(self, trainer: PolicyTrainer, batch: Batch, earlier: OnRecord | None) -> StepManifest:
        """The manifest on record, or a new one without the hash of the version that it updates. Unrecoverable when a
        plugin that a record of the batch names has another source hash than the run's."""
        trajectories, scores = batch.records
        used = merged(*(made.plugins for made in trajectories.values()), *(score.plugins for score in scores.values()))
        await agree(self.bus, self.run, [plugin for plugin in used if plugin not in self._agreed])
        self._agreed.update(used)
        if earlier is not None:
            return earlier.manifest
        window = self.closings.window(trainer.version)
        config = changed(self.config, self._orders.settings)
        made = records.manifest(config, self.run, trainer, batch.groups, window, used, trajectories.values())
        return self._orders.taken(msgspec.structs.replace(made, bytes=batch.bytes))

    async def _announce(self, trainer: PolicyTrainer, manifest: StepManifest, earlier: OnRecord | None) -> OnRecord:
        """The manifest on the bus, behind the outcome of the step before. One on record is written again, as a new
        incarnation, when it updates other bytes, or when it has no outcome and names other processes."""
        await self._recording.acquire()
        if earlier is None:
            manifest = msgspec.structs.replace(manifest, base_hash=self._hash)
        elif manifest.base_hash == self._hash and (earlier.outcome or manifest.layout == trainer.layout):
            return earlier
        else:
            manifest = records.renewed(manifest, self._hash, trainer)
        return OnRecord(await self._write(manifest), manifest)

    async def _compute(
        self,
        trainer: PolicyTrainer,
        manifest: StepManifest,
        fetched: Records,
        announcing: "Future[OnRecord]",
        raised_before: str,
    ) -> StepOutcome:
        """Take a step in the worker thread; the outcome has no state hash. An exception becomes a failed step if the
        weights still have the old bytes; so does `raised_before`, that of the recorded step."""
        trainer.config = under(self.config, manifest)
        reason, detail = raised.REASON, raised_before
        if lost := resume.beyond(manifest.step, fetched[0].values()):
            reason, detail = resume.REASON, lost

        def announced() -> None:
            with trainer.clock.spent("publish"):
                announcing.result()

        def work() -> StepOutcome:
            if detail:
                return trainer.give_up(reason, detail, hashed=False)
            return trainer.step(manifest, *fetched, announced, False, self.closings.resume)

        try:
            with trainer.clock.spent("busy"):
                return await self._in_thread(work)
        except Exception as error:
            on_record = await asyncio.wrap_future(announcing)  # its error comes first
            if isinstance(error, TrainerError):  # this node may not take the step at all
                raise Unrecoverable(f"TrainerError: {error}") from error
            if isinstance(error, StepRaised):
                await self._record_raised(trainer, on_record, error)
            if isinstance(error, GroupError):
                raise  # its group of processes has ended
            old = on_record.manifest.base_hash
            if trainer.version != manifest.version or await self._in_thread(trainer.state.hash) != old:
                raise  # the step was interrupted halfway: only the checkpoint has the old bytes
            self.log.exception("step_exception", text=(text := f"{type(error).__name__}: {error}"))
            return await self._in_thread(lambda: trainer.give_up(raised.REASON, text, hashed=False))
        finally:
            self.closings.resume()

    async def _record_raised(self, trainer: PolicyTrainer, on_record: OnRecord, error: StepRaised) -> None:
        """Record the failure of a step that has ended its group, unless it was done before."""
        seq, manifest = on_record.seq, on_record.manifest
        if on_record.outcome is None:
            failed = StepOutcome(
                version=manifest.version + 1,
                state_hash=manifest.base_hash,
                failed=raised.REASON,
                detail=error.raised,
            )
            record = records.outcome(self.config, seq, manifest, failed, trainer.clock.lap())
            assert isinstance(record, StepFailed)
            await self._write(record)
            await self.event("step_failed", raised.sentence(record), "error", step=manifest.step)

    async def _write(self, record: StepManifest | StepDone | StepFailed) -> int:
        """Publish on top of the last record of the run's steps. Returns the sequence. WrongSequence when replaced,
        Unrecoverable when the step was one too many that raised."""
        name = f"{self.run}.{record.type_name}.{record.step}.{record.incarnation}"
        self._step_seq = await self.bus.publish(STEP.at(run=self.run), record, msg_id=name, expect=self._step_seq)
        self._row.check(record)
        return self._step_seq

    async def _tell(self, record: StepDone | StepFailed, result: StepOutcome, span: tracing.TraceSpan) -> None:
        """The events of an outcome."""
        k, trace = record.step, span.context.trace_id
        if isinstance(record, StepFailed):
            await self.event("step_failed", raised.sentence(record), "error", step=k, trace=trace)
        elif left := result.left_out:
            text = (
                f"step {k}: {len(left)} of {len(left) + record.trained_slots} attempts are left out; {left[0].detail}"
            )
            reasons = Counter(each.reason for each in left)
            await self.event("left_out", text, "warning", step=k, trace=trace, **reasons)
        for engine in result.engines:
            span.event("engine_mismatch", step=k, **msgspec.structs.asdict(engine))
        if result.alarm:
            await self.event("mismatch", f"step {k}: {result.alarm}", "warning", step=k, trace=trace)
        if gaps := records.token_gaps(self.run, k, result):
            await self.publish_event(gaps, msg_id=f"{self.run}.gaps.{k}.{record.incarnation}")

    async def _of_publication(self, trainer: PolicyTrainer, result: "Future[T]") -> T:
        """A result of a publication, or the error that explains why there is none."""
        try:
            return await asyncio.wrap_future(result)
        except Exception as error:
            raise await asyncio.to_thread(trainer.explained, error) from error

    async def _publish(
        self, trainer: PolicyTrainer, publication: Publication, version: int, learning_rate: float = 0.0
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
            written_s=publication.durable_s,
        )
        # Every life announces its versions: the sender may have found a file gone, and the broker older.
        await self.publish_event(ready, msg_id=f"{self.run}.snapshot.{version}.{state_hash}.{self.id}")
        self.store.forget(version)

    async def _keep(self, trainer: PolicyTrainer, batch: Batch) -> None:
        """At the checkpoint interval and after a rollback, write a checkpoint and purge records of steps that are not
        kept for replay."""
        rolled_back = trainer.guard.discarded[-1:]
        last = trainer.version >= self.config.curriculum.steps or trainer.version - 1 in [n for _, n in rolled_back]
        if trainer.version % self.config.trainer.checkpoint_every and not last:
            return
        with trainer.clock.spent("publish"):
            await self._recording.acquire()
        try:
            with trainer.clock.spent("checkpoint"):
                position = {"close_seq": batch.groups[-1].close_seq, "step_seq": self._step_seq}
                await self.store.read_manifests(self.bus, self.run)
                try:
                    await self._in_thread(lambda: self.store.checkpoint(position))
                except OSError as error:
                    text = f"version {trainer.version}: {error}; the checkpoint before it stays"
                    await self.event("checkpoint_failed", text, "error", version=trainer.version)
                    raise
            await self.event("checkpoint", f"version {trainer.version}", version=trainer.version)
            if (old := await self.store.old_records(self.bus, self.run)) is not None:
                self._step_seq = await self.bus.publish(STEP.at(run=self.run), old, expect=self._step_seq)
                purged = await self.store.purge(self.bus, old)
                await self.event("purged", f"{purged} messages of steps that are no longer kept", messages=purged)
        finally:
            self._recording.release()

    async def _measure(self) -> None:
        progress = self._progress
        if progress is not None and (self.trainer is None or self.trainer.version == 0):
            await self.metric(**initial_policy.figures(progress, self._held_out))
        if self.trainer is not None:
            await self.metric(version=self.trainer.version, groups_ready=self.closings.ready.qsize())
