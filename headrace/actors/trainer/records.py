"""Builds the trainer's records: manifests and outcomes of steps. Pure functions, except for a call of git."""

import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

import headrace
from headrace.algorithms.staleness import Bounds
from headrace.bench.behaviour import behaviour_of
from headrace.config import Config
from headrace.ledger.seeds import seed_of
from headrace.messages.ledger import GroupClosed
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import Trajectory
from headrace.messages.training import (
    BatchGroup,
    Efficiency,
    StepDone,
    StepFailed,
    StepFigures,
    StepManifest,
    TokenGaps,
)
from headrace.registry import merged
from headrace.replay import reproduce
from headrace.replay.recipe import recipe
from headrace.training.figures.clock import CAUSES, Cause
from headrace.training.figures.work import Work
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer, plugins_of


class StalenessWindow(NamedTuple):
    """The staleness bounds of a batch and of the next one, which decide the versions to keep."""

    bound: int
    next: int

    @classmethod
    def of(cls, bounds: Bounds, step: int) -> "StalenessWindow":
        """The window of a step."""
        return cls(bounds.at(step), bounds.at(step + 1))

    def words(self) -> dict[str, float | int | str | bool]:
        """The entries of a manifest's objective."""
        versions: dict[str, float | int | str | bool] = {"keep_versions": self.next} if self.next > self.bound else {}
        return {"staleness": self.bound} | versions


@cache
def code() -> str:
    """Version of the package, and the git revision if the code runs from a checkout."""
    root = Path(headrace.__file__).resolve().parent.parent
    revision = ""
    if (root / ".git").exists():
        try:
            git = subprocess.run(
                ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
            )
            revision = git.stdout.strip() if git.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            revision = ""
    return f"headrace {headrace.__version__}{f' {revision}' if revision else ''}"


def batch_group(seq: int, closed: GroupClosed) -> BatchGroup:
    """The entry of a manifest for a GroupClosed at sequence `seq`."""
    slots = tuple((slot.trajectory_seq, slot.score_seq) for slot in closed.slots)
    return BatchGroup(group=closed.group, close_seq=seq, slots=slots)


def manifest(
    config: Config,
    run: str,
    trainer: PolicyTrainer,
    groups: tuple[BatchGroup, ...],
    window: StalenessWindow | None,
    plugins: tuple[Plugin, ...],
    trajectories: Iterable[Trajectory] = (),
) -> StepManifest:
    """The manifest of the trainer's next step, without the hash of the version that it updates: everything else that
    the step depends on. window: None for the configured bound. plugins: those that the batch's records name."""
    return StepManifest(
        run=run,
        step=trainer.version,
        version=trainer.version,
        base_hash="",
        groups=groups,
        seed=seed_of(config.run.seed, "step", trainer.version),
        code=code(),
        fingerprint=trainer.numerics.fingerprint,
        objective=recipe(config) | (window.words() if window is not None else {}),
        layout=trainer.layout,
        plugins=merged(plugins_of(config.algorithm), plugins),
        turn_seq=min((made.turns_from for made in trajectories if made.turns_from), default=0),
    )


def renewed(manifest: StepManifest, base_hash: str, trainer: PolicyTrainer) -> StepManifest:
    """The next incarnation of a step: the same batch and recipe, by this code and these processes."""
    return msgspec.structs.replace(
        manifest,
        incarnation=manifest.incarnation + 1,
        base_hash=base_hash,
        code=code(),
        fingerprint=trainer.numerics.fingerprint,
        layout=trainer.layout,
    )


def token_gaps(run: str, step: int, result: StepOutcome) -> TokenGaps | None:
    """The record of the gaps of a step's re-scored trajectories; None where none is to be published."""
    of = tuple(gap for gap in result.gaps if "." not in gap.trajectory)  # users' groups have a dot in their names
    return TokenGaps(run=run, step=step, of=of) if of else None


def outcome(
    config: Config,
    manifest_seq: int,
    manifest: StepManifest,
    result: StepOutcome,
    lap: tuple[float, Mapping[Cause, float]],
    trajectories: Iterable[Trajectory] = (),
) -> StepDone | StepFailed:
    """The StepDone or StepFailed of a step. lap: the step's time, as `Clock.lap` returns it. trajectories:
    the batch's."""
    groups = tuple(group.group for group in manifest.groups)
    wall_s, seconds = lap
    efficiency = Efficiency(
        wall_s=wall_s,
        seconds={cause: seconds[cause] for cause in CAUSES},
        peak_flops=result.peak_flops,
        between_s=result.between_s,
        collectives_s=result.collectives_s,
        peak_bytes=result.peak_bytes,
        planned_bytes=result.planned_bytes,
        **_work(result)._asdict(),
    )
    if result.failed:
        return StepFailed(
            run=manifest.run,
            step=manifest.step,
            incarnation=manifest.incarnation,
            version=result.version,
            state_hash=result.state_hash,
            manifest_seq=manifest_seq,
            groups=groups,
            dropped_slots=sum(len(group.slots) for group in manifest.groups),
            reason=result.failed,
            detail=result.detail,
            restored=result.restored,
            command=reproduce.step(config, manifest.run, manifest.step),
            efficiency=efficiency,
        )
    figures = {name: getattr(result, name) for name in StepFigures.__struct_fields__}
    return StepDone(
        run=manifest.run,
        step=manifest.step,
        incarnation=manifest.incarnation,
        manifest_seq=manifest_seq,
        groups=groups,
        staleness_bound=int(manifest.objective.get("staleness", config.curriculum.staleness)),
        waited_s=seconds["batch"],
        behaviour=behaviour_of(trajectories),
        efficiency=efficiency,
        **figures,
    )


def _work(result: StepOutcome) -> Work:
    """The work that a step did. A failed one trained nothing, and one that ended before its gradient computed no
    gradient either: its predicted work is left out."""
    if not result.failed:
        return result.work
    if not result.computed_tokens:
        return Work(expert_load=result.work.expert_load)
    return result.work._replace(trained_tokens=0, model_flops=0.0)
