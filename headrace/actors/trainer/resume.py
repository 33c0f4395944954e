"""The checkpoint that a trainer resumes from: the newest one that is whole and that the streams support.

A broker may know less than the trainer's disk: after a power cut it has lost its last seconds, and a restored backup is
older. A checkpoint of version v is supported when the outcome of step v - 1 is in HR_STEP. Newer ones are set aside
under another name, so that nothing is lost, and the run goes back to the newest supported one. Tokens that engines
sampled from versions which are gone cannot be trained on: nobody could check what wrote them (`beyond`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

from headrace.bus.errors import Unrecoverable
from headrace.bus.runtime.actor import Actor
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone, StepFailed
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError

CURRENT = "checkpoint.safetensors"
REASON = "lost_version"
"""`StepFailed.reason` of a batch with tokens of a version that the run no longer has."""


async def choose(actor: Actor, folder: Path) -> None:
    """Make the newest supported checkpoint the current one, with an event where it is another. folder: of the
    checkpoints. Unrecoverable when there is none."""
    current = folder / CURRENT
    if not current.exists():
        return
    reached = 0
    async for received in actor.bus.history("HR_STEP", STEP.at(run=actor.run)):
        if isinstance(received.message, StepDone | StepFailed):
            reached = max(reached, received.message.step + 1)
    version = _version(current)
    if version is None or version <= reached:  # opening it says what is wrong with a damaged file
        return
    text = f"the broker has the steps up to version {reached}, and the checkpoint is of version {version}"
    await _go_back(actor, folder, "ahead", text, [file for file in _named(folder) if (_version(file) or 0) <= reached])


async def replace(actor: Actor, folder: Path, why: Exception) -> None:
    """Set a damaged checkpoint aside and make the one before it the current one. Unrecoverable when there is none."""
    if not (folder / CURRENT).exists():
        raise Unrecoverable(f"{why}; remove it, and mid-training begins again")
    bad = os.stat(folder / CURRENT).st_ino
    await _go_back(actor, folder, "damaged", str(why), [file for file in _named(folder) if file.stat().st_ino != bad])


async def _go_back(actor: Actor, folder: Path, mark: str, why: str, usable: list[Path]) -> None:
    if not usable:
        raise Unrecoverable(
            f"{why}; {folder} has no earlier checkpoint that can be used: restore a newer backup of the broker "
            "(`headrace bus restore`), or start another run ([run] id)"
        )
    target, current, draft = usable[-1], folder / CURRENT, folder / f"{CURRENT}.next"
    for file in [file for file in _named(folder) if file > target]:
        file.rename(file.with_suffix(f".{mark}"))
    # There is a checkpoint at any moment: without one, a trainer that is killed here would begin at version 0.
    (aside := folder / f"{CURRENT}.{mark}").unlink(missing_ok=True)
    os.link(current, aside)
    draft.unlink(missing_ok=True)
    os.link(target, draft)
    draft.replace(current)
    await actor.event("went_back", f"{why}; the run goes on from {target.name}", "warning", checkpoint=target.name)


def _named(folder: Path) -> list[Path]:
    """Checkpoints that are kept for replay, the oldest first."""
    return sorted(folder.glob("v*.safetensors"))


def _version(file: Path) -> int | None:
    """None for a file that is no checkpoint."""
    try:
        return int(Snapshot(file).metadata["version"])
    except (OSError, WeightError, ValueError, KeyError):
        return None


def beyond(step: int, trajectories: Iterable[Trajectory]) -> str:
    """Says which version the tokens of a batch name although no step has made it yet; empty when there is none."""
    newest = max((span.version for made in trajectories for turn in made.turns for span in turn.spans), default=0)
    return f"a token was sampled from version {newest}, which the run no longer has" if newest > step else ""
