"""Replays one recorded step from the nearest checkpoint before it, with the published manifests and records.

The replay does what a trainer does after a crash, in a folder of its own and without publishing anything. Equal bits
need an equal numerics fingerprint; with another one the step still runs, and the report says that they differ.
"""

import asyncio
import math
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepFailed, StepManifest
from headrace.policy.config import CheckpointError as PolicyError
from headrace.replay.recipe import alone, under
from headrace.replay.recorded_run import Outcome, RecordedRun, ReplayError
from headrace.training.checkpoint import CheckpointError
from headrace.training.device import TrainerError
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer


class StepReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace replay RUN --step N` prints."""

    step: int
    bitwise_equal: bool
    loss: float
    grad_norm: float
    weights_hash: str
    fingerprint_match: bool


class Loaded(NamedTuple):
    """A trainer that is about to take a step, and the step's manifest, trajectories and scores."""

    trainer: PolicyTrainer
    """The trainer at the step's version, with the recipe of its manifest."""
    manifest: StepManifest
    recorded: Outcome
    trajectories: Mapping[int, Trajectory]
    scores: Mapping[int, Score]


def attempt(loaded: Loaded) -> StepOutcome:
    """Take the step. An exception becomes a failed step, as in the trainer."""
    trainer, manifest = loaded.trainer, loaded.manifest
    try:
        return trainer.step(manifest, loaded.trajectories, loaded.scores)
    except TrainerError as error:
        raise ReplayError(str(error)) from None
    except Exception as error:
        if trainer.version != manifest.version:
            raise
        return trainer.give_up("exception", f"{type(error).__name__}: {error}")


def compare(loaded: Loaded, result: StepOutcome) -> StepReplay:
    """Compare the outcome of the replay with the published one."""
    recorded = loaded.recorded
    equal = result.state_hash == recorded.state_hash
    if isinstance(recorded, StepFailed):
        equal = equal and result.failed == recorded.reason
    else:
        equal = equal and (result.failed, result.loss) == ("", recorded.loss)
        # Ranks add the squares of their shards, so the norm may differ by rounding in the sixteenth digit.
        several = "ranks" in loaded.manifest.objective
        equal = equal and math.isclose(result.grad_norm, recorded.grad_norm, rel_tol=1e-9 if several else 0.0)
    return StepReplay(
        step=loaded.manifest.step,
        bitwise_equal=equal,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_hash=result.state_hash,
        fingerprint_match=loaded.trainer.numerics.fingerprint == loaded.manifest.fingerprint
        # Before it had runs of tokens, context parallelism added gradients in an order that one process does not have.
        and ("context_ranks" not in loaded.manifest.objective or "context_runs" in loaded.manifest.objective),
    )


class Rerun:
    """A run's trainer in a folder of its own, which ends with the context."""

    def __init__(self, recorded: RecordedRun) -> None:
        self.recorded = recorded
        self.strayed = -1
        """The first intermediate step whose bits differ from the published ones; -1 for none."""
        self._trainer: PolicyTrainer | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="headrace-replay-")
        self._opened = 0

    def __enter__(self) -> "Rerun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scratch.cleanup()

    async def reach(self, step: int) -> Loaded:
        """Bring a trainer to a step. ReplayError when a checkpoint or a record is missing."""
        manifest, recorded = self.recorded.finished(step)
        start = self.recorded.nearest(step)
        trainer = self._trainer
        if trainer is None or self.strayed >= 0 or not start <= trainer.version <= step:
            self.strayed = -1
            trainer = self._trainer = await asyncio.to_thread(self.open, self.recorded.checkpoints[start])
        while trainer.version < step:
            await self._pass(trainer)
        trajectories, scores = await self.recorded.records(manifest)
        trainer.config = under(self.recorded.config, manifest)
        if trainer.state.hash() != manifest.base_hash and self.strayed < 0:
            self.strayed = step
        return Loaded(trainer, manifest, recorded, trajectories, scores)

    async def _pass(self, trainer: PolicyTrainer) -> None:
        """Take an intermediate step. A step that raised is not tried again, because it left the weights as they
        were."""
        manifest, recorded = self.recorded.finished(trainer.version)
        trainer.config = under(self.recorded.config, manifest)
        if isinstance(recorded, StepFailed) and recorded.reason == "exception":
            result = trainer.give_up(recorded.reason, recorded.detail)
        else:
            loaded = Loaded(trainer, manifest, recorded, *await self.recorded.records(manifest))
            result = await asyncio.to_thread(attempt, loaded)
        if result.state_hash != recorded.state_hash and self.strayed < 0:
            self.strayed = manifest.step

    def open(self, checkpoint: Path) -> PolicyTrainer:
        """A trainer at a checkpoint, in a folder of its own. ReplayError when the checkpoint cannot be read."""
        self._opened += 1
        folder = Path(self._scratch.name) / str(self._opened)
        folder.mkdir()
        target = folder / "checkpoint.safetensors"
        try:
            os.link(checkpoint, target)
        except OSError:  # another file system
            try:
                target.write_bytes(checkpoint.read_bytes())
            except OSError as error:
                raise ReplayError(f"{checkpoint} cannot be read: {error.strerror}") from None
        try:
            return PolicyTrainer.prepare(
                alone(self.recorded.config), folder, tokenizer_json=self.recorded.tokenizer, traces=tuple
            )
        except (TrainerError, CheckpointError, PolicyError, ValueError) as error:
            text = str(error).replace(str(target), str(checkpoint))
            raise ReplayError(f"run {self.recorded.run} cannot be opened: {text}") from None


async def replay_steps(
    recorded: RecordedRun, steps: Iterable[int], warn: list[str] | None = None
) -> AsyncIterator[StepReplay]:
    """Run some steps again, in their order; intermediate steps are taken once. warn: receives a sentence if the bits of
    intermediate steps differ."""
    with Rerun(recorded) as rerun:
        for step in sorted(steps):
            loaded = await rerun.reach(step)
            if rerun.strayed >= 0 and warn is not None:
                warn.append(
                    f"step {step} starts from other weights than in the run: the replay differs from step "
                    f"{rerun.strayed} on"
                )
            yield compare(loaded, await asyncio.to_thread(attempt, loaded))


def choose(recorded: RecordedRun, count: int, seed: int) -> list[int]:
    """Up to `count` steps that can be run again, drawn by `seed`, in order. ReplayError when there are none."""
    replayable = recorded.kept()
    if not replayable:
        raise ReplayError(f"run {recorded.run} has no finished step that can be run again")
    return sorted(random.Random(f"replay-{seed}").sample(replayable, min(count, len(replayable))))
