"""A step of the past, run again: the nearest checkpoint before it, the published manifests since, the same records.

What the trainer would do after a crash is done here in a folder of its own, without a word on the bus. Equal bits need
an equal numerics fingerprint; on another one the step still runs, and the line says that the fingerprints differ.
"""

import asyncio
import copy
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepFailed, StepManifest
from headrace.policy.config import CheckpointError as PolicyError
from headrace.replay.past import Outcome, Past, ReplayError, of_run
from headrace.replay.recipe import under
from headrace.training.checkpoint import CheckpointError
from headrace.training.step import StepOutcome, refuse
from headrace.training.trainer import Trainer, TrainerError


class StepReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of `headrace replay RUN --step N`."""

    step: int
    bitwise_equal: bool
    loss: float
    grad_norm: float
    weights_hash: str
    fingerprint_match: bool


class Loaded(NamedTuple):
    """Everything that a step needs, in front of it."""

    trainer: Trainer
    """At the step's version, with the recipe of its manifest."""
    manifest: StepManifest
    recorded: Outcome
    trajectories: Mapping[int, Trajectory]
    scores: Mapping[int, Score]


def attempt(loaded: Loaded) -> StepOutcome:
    """Take the step. What raises inside becomes a failed step, as the trainer makes one of it."""
    trainer, manifest = loaded.trainer, loaded.manifest
    try:
        return trainer.step(manifest, loaded.trajectories, loaded.scores)
    except Exception as error:
        if trainer.version != manifest.version:
            raise
        return give_up(trainer, "exception", f"{type(error).__name__}: {error}")


def give_up(trainer: Trainer, reason: str, detail: str) -> StepOutcome:
    """The next version, with the old bytes; the old one may be asked for by later steps."""
    trainer.kept[trainer.version] = copy.deepcopy(trainer.state.model)
    return refuse(trainer.state, reason, detail)


def compare(loaded: Loaded, result: StepOutcome) -> StepReplay:
    """What came out now, against what was published."""
    known = loaded.recorded
    equal = result.state_hash == known.state_hash
    if isinstance(known, StepFailed):
        equal = equal and result.failed == known.reason
    else:
        figures = (result.failed, result.loss, result.grad_norm)
        equal = equal and figures == ("", known.loss, known.grad_norm)
    return StepReplay(
        step=loaded.manifest.step,
        bitwise_equal=equal,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_hash=result.state_hash,
        fingerprint_match=loaded.trainer.numerics.fingerprint == loaded.manifest.fingerprint,
    )


class Rerun:
    """A run's trainer in a folder of its own, which ends with the context."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self.strayed = -1
        """The first step on the way whose bits were other than the published ones; -1 for none."""
        self._trainer: Trainer | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="headrace-replay-")
        self._opened = 0

    def __enter__(self) -> "Rerun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scratch.cleanup()

    async def reach(self, step: int) -> Loaded:
        """Get in front of a step. ReplayError says why it cannot be reached."""
        manifest, recorded = self.past.finished(step)
        start = self.past.nearest(step)
        trainer = self._trainer
        if trainer is None or self.strayed >= 0 or not start <= trainer.version <= step:
            self.strayed = -1
            trainer = self._trainer = await asyncio.to_thread(self.open, self.past.checkpoints[start])
        while trainer.version < step:
            await self._pass(trainer)
        trajectories, scores = await self.past.records(manifest)
        trainer.config = under(self.past.config, manifest)
        if trainer.state.hash() != manifest.base_hash and self.strayed < 0:
            self.strayed = step
        return Loaded(trainer, manifest, recorded, trajectories, scores)

    async def _pass(self, trainer: Trainer) -> None:
        """A step on the way. One that raised is not tried again: its bytes are the old ones whatever happens now."""
        manifest, recorded = self.past.finished(trainer.version)
        trainer.config = under(self.past.config, manifest)
        if isinstance(recorded, StepFailed) and recorded.reason == "exception":
            result = give_up(trainer, recorded.reason, recorded.detail)
        else:
            loaded = Loaded(trainer, manifest, recorded, *await self.past.records(manifest))
            result = await asyncio.to_thread(attempt, loaded)
        if result.state_hash != recorded.state_hash and self.strayed < 0:
            self.strayed = manifest.step

    def open(self, checkpoint: Path) -> Trainer:
        """A trainer at a checkpoint, in a folder of its own. ReplayError."""
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
            return Trainer.prepare(self.past.config, folder, tokenizer_json=self.past.tokenizer, traces=tuple)
        except (TrainerError, CheckpointError, PolicyError, ValueError) as error:
            text = str(error).replace(str(target), str(checkpoint))
            raise ReplayError(f"run {self.past.run} cannot be opened: {text}") from None


async def replay_step(bus: Bus, config: Config, folder: Path, run: str, step: int) -> StepReplay:
    """One step of a run, from its streams and its folder. ReplayError says why it cannot be done."""
    with Rerun(await of_run(bus, config, folder, run)) as rerun:
        loaded = await rerun.reach(step)
        return compare(loaded, await asyncio.to_thread(attempt, loaded))


async def replay_steps(past: Past, steps: Iterable[int], warn: list[str] | None = None) -> AsyncIterator[StepReplay]:
    """Run some steps again, in their order; neighbours share the way. warn: gets a sentence where the way strayed."""
    with Rerun(past) as rerun:
        for step in sorted(steps):
            loaded = await rerun.reach(step)
            if rerun.strayed >= 0 and warn is not None:
                warn.append(f"step {step} starts from other bits than it did: they differ from step {rerun.strayed} on")
            yield compare(loaded, await asyncio.to_thread(attempt, loaded))


def choose(past: Past, count: int, seed: int) -> list[int]:
    """Up to `count` steps that can be run again, drawn by `seed`, in order. ReplayError when there are none."""
    kept = past.kept()
    if not kept:
        raise ReplayError(f"run {past.run} has no finished step that can be run again")
    return sorted(random.Random(f"replay-{seed}").sample(kept, min(count, len(kept))))
