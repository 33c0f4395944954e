"""What the trainer writes: manifests before a step, outcomes after it. Pure, but for asking git for a revision."""

import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import headrace
from headrace.algorithms.staleness import Bounds
from headrace.config import Config
from headrace.messages.ledger import GroupClosed
from headrace.messages.training import BatchGroup, StepDone, StepFailed, StepManifest
from headrace.replay import reproduce
from headrace.replay.recipe import recipe
from headrace.replay.seeds import seed_of
from headrace.training.step import StepOutcome


class Law(NamedTuple):
    """The staleness bound of a batch and of the one after it, for which versions must be kept."""

    bound: int
    next: int

    @classmethod
    def of(cls, bounds: Bounds, step: int) -> "Law":
        """That of a step."""
        return cls(bounds.at(step), bounds.at(step + 1))

    @classmethod
    def as_in(cls, manifest: StepManifest) -> "Law | None":
        """That of a manifest which is renewed."""
        bound = int(manifest.objective.get("staleness", -1))
        return cls(bound, int(manifest.objective.get("keep_versions", bound))) if bound >= 0 else None

    def words(self) -> dict[str, float | int | str | bool]:
        """As a manifest says it."""
        kept: dict[str, float | int | str | bool] = {"keep_versions": self.next} if self.next > self.bound else {}
        return {"staleness": self.bound} | kept


@cache
def code() -> str:
    """Version of the package, and the git revision where the code runs from a checkout."""
    root = Path(headrace.__file__).resolve().parent.parent
    revision = ""
    if (root / ".git").exists():
        try:
            asked = subprocess.run(
                ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
            )
            revision = asked.stdout.strip() if asked.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            revision = ""
    return f"headrace {headrace.__version__}{f' {revision}' if revision else ''}"


def batch_group(seq: int, closed: GroupClosed) -> BatchGroup:
    """A closing as a manifest names it."""
    slots = tuple((slot.trajectory_seq, slot.score_seq) for slot in closed.slots)
    return BatchGroup(group=closed.group, close_seq=seq, slots=slots)


def manifest(
    config: Config,
    run: str,
    step: int,
    incarnation: int,
    base_hash: str,
    groups: tuple[BatchGroup, ...],
    mark: str,
    law: Law | None = None,
) -> StepManifest:
    """Everything that a step depends on. `mark`: the numerics fingerprint. `law`: the run's, else as configured."""
    return StepManifest(
        run=run,
        step=step,
        incarnation=incarnation,
        version=step,
        base_hash=base_hash,
        groups=groups,
        seed=seed_of(config.run.seed, "step", step),
        code=code(),
        fingerprint=mark,
        objective=recipe(config) | (law.words() if law is not None else {}),
    )


def outcome(
    config: Config, manifest: StepManifest, manifest_seq: int, result: StepOutcome, waited_s: float
) -> StepDone | StepFailed:
    """The record of a step that was taken."""
    groups = tuple(group.group for group in manifest.groups)
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
        )
    return StepDone(
        run=manifest.run,
        step=manifest.step,
        incarnation=manifest.incarnation,
        version=result.version,
        state_hash=result.state_hash,
        manifest_seq=manifest_seq,
        groups=groups,
        trained_slots=result.trained_slots,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        reward_mean=result.reward_mean,
        pass_rate=result.pass_rate,
        tokens=result.tokens,
        staleness=dict(result.staleness),
        staleness_max=result.staleness_max,
        staleness_bound=int(manifest.objective.get("staleness", config.curriculum.staleness)),
        k1=result.k1,
        k3=result.k3,
        max_abs_dlp=result.max_abs_dlp,
        rescored_tokens=result.rescored_tokens,
        exact=result.exact,
        seconds=result.seconds,
        waited_s=waited_s,
        entropy=result.entropy,
        clipped=result.clipped,
        engines=result.engines,
        alarm=result.alarm,
    )
