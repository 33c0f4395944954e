"""A step of the past, run again: the nearest checkpoint before it, the published manifests since, the same records.

What the trainer would do after a crash is done here in a folder of its own, without a word on the bus. Equal bits need
an equal numerics fingerprint; on another one the step still runs, and the line says that the fingerprints differ.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.replay.fetching import fetch
from headrace.replay.recipe import changed, under
from headrace.training.step import StepOutcome
from headrace.training.trainer import Trainer


class ReplayError(Exception):
    """The step cannot be run again; the text says what is missing."""


class StepReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of `headrace replay RUN --step N`."""

    step: int
    bitwise_equal: bool
    loss: float
    grad_norm: float
    weights_hash: str
    fingerprint_match: bool


Manifests = dict[int, StepManifest]
Outcomes = dict[int, StepDone | StepFailed]


async def replay_step(
    bus: Bus,
    config: Config,
    folder: Path,
    run: str,
    step: int,
    objective: Mapping[str, float | int | str | bool] | None = None,
) -> StepReplay:
    """Run a step again and compare. folder: of the run. ReplayError says why it cannot be done.

    objective: settings by which the step itself, not those before it, differs from its manifest.
    """
    manifests, outcomes = await _steps(bus, run)
    if step not in manifests or step not in outcomes:
        last = max(outcomes, default=-1)
        raise ReplayError(f"run {run} has no finished step {step}; it has {f'0 to {last}' if last >= 0 else 'none'}")
    start = nearest(folder / "checkpoints", step)
    if start is None:
        raise ReplayError(f"{folder / 'checkpoints'} holds no checkpoint of version {step} or before")
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as scratch:
        trainer = await asyncio.to_thread(_open, config, folder, start, Path(scratch))
        result: StepOutcome | None = None
        while trainer.version <= step:
            manifest = manifests[trainer.version]
            trajectories, scores = await fetch(bus, manifest.groups)
            _check(manifest, trajectories, scores)
            trainer.config = under(config, manifest)
            if objective and manifest.step == step:
                trainer.config = changed(trainer.config, objective)
            result = await asyncio.to_thread(trainer.step, manifest, trajectories, scores)
    assert result is not None
    known = outcomes[step]
    equal = result.state_hash == known.state_hash and bool(result.failed) == isinstance(known, StepFailed)
    if isinstance(known, StepDone):
        equal = equal and (result.loss, result.grad_norm) == (known.loss, known.grad_norm)
    return StepReplay(
        step=step,
        bitwise_equal=equal,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_hash=result.state_hash,
        fingerprint_match=trainer.numerics.fingerprint == manifests[step].fingerprint,
    )


async def _steps(bus: Bus, run: str) -> tuple[Manifests, Outcomes]:
    """Manifests and outcomes of a run; of several incarnations the newest."""
    manifests: Manifests = {}
    outcomes: Outcomes = {}
    async for received in bus.history("HR_STEP", STEP.at(run=run)):
        record = received.message
        if isinstance(record, StepManifest):
            manifests[record.step] = record
        elif isinstance(record, StepDone | StepFailed):
            outcomes[record.step] = record
    return manifests, outcomes


def nearest(checkpoints: Path, step: int) -> Path | None:
    """The newest checkpoint from which a step can be reached: of its version or an earlier one."""
    fitting = [file for file in sorted(checkpoints.glob("v*.safetensors")) if int(file.name[1:9]) <= step]
    return fitting[-1] if fitting else None


def _open(config: Config, folder: Path, start: Path, scratch: Path) -> Trainer:
    """The run's trainer at a checkpoint, in a folder of its own."""
    try:
        os.link(start, scratch / "checkpoint.safetensors")
    except OSError:  # another file system
        (scratch / "checkpoint.safetensors").write_bytes(start.read_bytes())
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return Trainer.prepare(config, scratch, tokenizer_json=text, traces=tuple)


def _check(manifest: StepManifest, trajectories: Iterable[int], scores: Iterable[int]) -> None:
    """Records that were purged make the answer, not a failed step."""
    have_trajectories, have_scores = set(trajectories), set(scores)
    for group in manifest.groups:
        for trajectory, score in group.slots:
            if trajectory not in have_trajectories or score not in have_scores:
                raise ReplayError(f"purged: group {group.group} of step {manifest.step} is not in the streams any more")
