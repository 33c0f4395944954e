"""Replays one recorded step from the nearest checkpoint before it, with the published manifests and records.

The replay does what a trainer does after a crash, in a folder of its own and without publishing anything. Equal bits
need an equal numerics fingerprint and the manifest's layout of ranks: the replay starts as many processes on this
machine. With another fingerprint the step still runs, and the report says that they differ. Where the machine has too
few CUDA devices for the layout, one process takes the step: it adds up the gradient in another order, and its tensors
are compared with the recorded ones.
"""

import asyncio
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.messages.base import Finite
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import RankLayout, StepFailed, StepManifest
from headrace.policy.config import CheckpointError
from headrace.replay.recipe import in_layout, under
from headrace.replay.recorded_run import Outcome, RecordedRun, ReplayError
from headrace.training import opening
from headrace.training.checkpoint import UnusableCheckpoint
from headrace.training.device import TrainerError, device_named
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.interface import GroupError, StepRaised
from headrace.training.trainer import PolicyTrainer
from headrace.weights import tensor_state

BOUND = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest `TensorDifference.difference`, by the policy's dtype: rounding is far below, another gradient far above."""
_HEAD = "master."
OTHER = (
    "the step was recorded with the arithmetic {} and is replayed with {}: another processor, torch or version of "
    "headrace computes other bits; replay it where it was recorded, with the version of that time"
)


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor."""

    tensor: str
    difference: Finite
    """Euclidean norm of the difference over that of the recorded move; without a move the norm itself."""
    bound: Finite

    @property
    def within(self) -> bool:
        """Whether the bound holds."""
        return self.difference <= self.bound


class StepReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace replay RUN --step N` prints."""

    step: int
    bitwise_equal: bool
    loss: float
    grad_norm: float
    weights_hash: str
    fingerprint_match: bool
    layout_match: bool
    """Whether the processes were those of the manifest, with its versions and settings."""
    why: str = ""
    """Where the bits differ and the fingerprint does too: both fingerprints, and what they name."""
    differences: tuple[TensorDifference, ...] = ()
    """In another layout: every tensor, if the recorded run keeps a checkpoint of the step's version."""

    @property
    def holds(self) -> bool:
        """Whether the bits are equal; in another layout, whether every tensor is within its bound."""
        return self.bitwise_equal or (bool(self.differences) and all(each.within for each in self.differences))


class Loaded(NamedTuple):
    """A trainer that is about to take a step, and the step's manifest, trajectories and scores."""

    trainer: PolicyTrainer
    """The trainer at the step's version, with the recipe of its manifest."""
    manifest: StepManifest
    recorded: Outcome
    trajectories: Mapping[int, Trajectory]
    scores: Mapping[int, Score]
    start: Path | None = None
    """The recorded checkpoint at which the replay began."""
    end: Path | None = None
    """The recorded checkpoint of the step's version, where one is kept."""


def attempt(loaded: Loaded) -> StepOutcome:
    """Take the step. An exception becomes a failed step, as in the trainer. ReplayError when a process was lost."""
    trainer, manifest = loaded.trainer, loaded.manifest
    try:
        return trainer.step(manifest, loaded.trajectories, loaded.scores)
    except StepRaised as error:  # it has ended the group
        base = manifest.base_hash
        return StepOutcome(version=manifest.version + 1, state_hash=base, failed="exception", detail=error.raised)
    except (TrainerError, GroupError) as error:
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
        equal = equal and (result.grad_norm, result.left_out) == (recorded.grad_norm, recorded.left_out)
    trainer, told = loaded.trainer, loaded.manifest
    alike, apart = trainer.layout == told.layout, tuple[TensorDifference, ...]()
    if not alike and not equal and trainer.layout is None and loaded.start and loaded.end:
        apart = differences(trainer.state.tensors(), loaded.start, loaded.end, trainer.state.model.config.dtype)
    here = trainer.numerics.fingerprint
    return StepReplay(
        step=loaded.manifest.step,
        bitwise_equal=equal,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_hash=result.state_hash,
        fingerprint_match=here == told.fingerprint,
        layout_match=alike,
        why="" if equal or here == told.fingerprint else OTHER.format(told.fingerprint, here),
        differences=apart,
    )


def differences(ours: dict[str, Tensor], start: Path, end: Path, dtype: str) -> tuple[TensorDifference, ...]:
    """Every master, the largest difference first. ours: of the replay, as `TrainerState.tensors`; start, end: the
    recorded checkpoints at which the replay began and ended. dtype: of the policy."""
    first, last = tensor_state.read(start), tensor_state.read(end)
    names = sorted(name for name in last if name.startswith(_HEAD))
    made = [
        TensorDifference(
            tensor=name.removeprefix(_HEAD),
            difference=_share(ours[name].cpu(), first[name], last[name]),
            bound=BOUND[dtype],
        )
        for name in names
    ]
    return tuple(sorted(made, key=lambda each: -each.difference))


def _share(ours: Tensor, first: Tensor, last: Tensor) -> float:
    moved, apart = (float(torch.linalg.vector_norm(last.double() - other.double())) for other in (first, ours))
    return apart / moved if moved else apart


class Rerun:
    """A run's trainer in a folder of its own, which ends with the context."""

    def __init__(self, recorded: RecordedRun, most: int | None = None) -> None:
        """most: ranks that this machine can start; by itself as many as there are CUDA devices, any number on CPUs."""
        self.recorded = recorded
        self._most = most if most is not None else most_ranks(recorded)
        self._start = Path()
        self.strayed = -1
        """The first intermediate step whose bits differ from the published ones; -1 for none."""
        self._trainer: PolicyTrainer | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="headrace-replay-")
        self._opened = 0

    def __enter__(self) -> "Rerun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
        self._scratch.cleanup()

    def _close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    async def reach(self, step: int, *, alone: bool = False) -> Loaded:
        """Bring a trainer to a step. alone: this process takes it, whatever its layout. ReplayError when a checkpoint
        or a record is missing."""
        manifest, recorded = self.recorded.finished(step)
        start = self.recorded.nearest(step)
        trainer = self._trainer
        if trainer is None or trainer.ended or self.strayed >= 0 or not start <= trainer.version <= step:
            self.strayed, self._start = -1, self.recorded.checkpoints[start]
            await asyncio.to_thread(self._open_again, self._start, self.recorded.finished(start)[0])
        while self._trainer is not None and self._trainer.version < step:
            await self._pass()
        trainer = await asyncio.to_thread(self._laid_out, manifest, alone)
        trajectories, scores = await self.recorded.records(manifest)
        if trainer.state.hash() != manifest.base_hash and self.strayed < 0:
            self.strayed = step
        end = self.recorded.checkpoints.get(step + 1)
        return Loaded(trainer, manifest, recorded, trajectories, scores, self._start, end)

    async def _pass(self) -> None:
        """Take an intermediate step. A step that raised is not tried again, because it left the weights as they
        were."""
        assert self._trainer is not None
        manifest, recorded = self.recorded.finished(self._trainer.version)
        trainer = await asyncio.to_thread(self._laid_out, manifest)
        if isinstance(recorded, StepFailed) and recorded.reason == "exception":
            result = trainer.give_up(recorded.reason, recorded.detail)
        else:
            loaded = Loaded(trainer, manifest, recorded, *await self.recorded.records(manifest))
            result = await asyncio.to_thread(attempt, loaded)
        if result.state_hash != recorded.state_hash and self.strayed < 0:
            self.strayed = manifest.step

    def _startable(self, manifest: StepManifest) -> RankLayout | None:
        """The layout of a step if this machine can start it; None: one process."""
        layout = manifest.layout
        return layout if layout is not None and layout.ranks <= self._most else None

    def _open_again(self, checkpoint: Path, manifest: StepManifest) -> None:
        self._close()
        self._trainer = self.open(checkpoint, self._startable(manifest))

    def _laid_out(self, manifest: StepManifest, alone: bool = False) -> PolicyTrainer:
        """The trainer with the recipe of a step, in its layout: where the last step had another, it is opened again."""
        trainer, wanted = self._trainer, None if alone else self._startable(manifest)
        assert trainer is not None
        if counts(trainer.layout) != counts(wanted):
            trainer.save({})
            self._close()
            trainer = self._trainer = self.open(trainer.folder / "checkpoint.safetensors", wanted)
        trainer.config = under(in_layout(self.recorded.config, wanted), manifest)
        if manifest.restore >= 0:
            self._copy(manifest.restore, trainer.folder)
        return trainer

    def _copy(self, version: int, folder: Path) -> None:
        """Give a trainer the checkpoint to which its step goes back. ReplayError when it is not kept."""
        file = self.recorded.checkpoints.get(version)
        if file is None:
            raise ReplayError(f"run {self.recorded.run} keeps no checkpoint of version {version}, which was restored")
        target = folder / f"v{version:08d}.safetensors"
        if not target.exists():
            _link(file, target)

    def open(self, checkpoint: Path, layout: RankLayout | None = None) -> PolicyTrainer:
        """A trainer at a checkpoint, in a folder of its own, over the ranks of a layout. ReplayError when the
        checkpoint cannot be read or a rank cannot start."""
        if layout is not None:  # NCCL reads them
            told = {"NCCL_ALGO": layout.nccl_algo, "NCCL_PROTO": layout.nccl_proto}
            os.environ.update({name: value for name, value in told.items() if value})
        self._opened += 1
        folder = Path(self._scratch.name) / str(self._opened)
        folder.mkdir()
        target = folder / "checkpoint.safetensors"
        _link(checkpoint, target)
        try:
            config = in_layout(self.recorded.config, layout)
            return opening.prepare(config, folder, tokenizer_json=self.recorded.tokenizer, traces=tuple)
        except (TrainerError, CheckpointError, UnusableCheckpoint, ValueError, GroupError) as error:
            text = str(error).replace(str(target), str(checkpoint))
            raise ReplayError(f"run {self.recorded.run} cannot be opened: {text}") from None


def _link(checkpoint: Path, target: Path) -> None:
    """A checkpoint under another name. ReplayError when it cannot be read."""
    try:
        os.link(checkpoint, target)
    except OSError:  # another file system
        try:
            shutil.copyfile(checkpoint, target)
        except OSError as error:
            raise ReplayError(f"{checkpoint} cannot be read: {error.strerror}") from None


def most_ranks(recorded: RecordedRun) -> int:
    """Ranks of a run that this machine can start."""
    cuda = device_named(recorded.config.trainer.device).type == "cuda"
    return torch.cuda.device_count() if cuda else sys.maxsize


def counts(layout: RankLayout | None) -> tuple[int, ...]:
    """The numbers of processes of a layout."""
    return (layout.ranks, layout.nodes, layout.expert_ranks, layout.context_ranks) if layout is not None else (1,)


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
