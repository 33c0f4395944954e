"""Measures the bias of speculative attempts: of two attempts at a slot, usually the shorter one is scored first.

The last slots of a group may be issued a second time while their first attempts still run, and the attempt that is
scored first counts. Both sample from the same policy, so the kept one is the faster of two: the policy is trained on
shorter episodes than it produces and, where short episodes fail or pass more often, on other rewards. The slower
attempt runs to its end and is judged too, so the bias is measured: the means of the kept attempts against those of the
first attempts, over the same slots.

Trade-off: the slower attempt runs to its end only for this measurement. Speculation is off by default.
"""

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from headrace.ledger.state import Group


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Means over one attempt per slot."""

    sampled_tokens: float
    wall_s: float | None
    """None if any of the trajectories was purged."""
    reward: float


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Slots with a speculative attempt."""

    slots: int
    second_kept: int
    """Number of these slots whose later attempt was scored first."""
    pairs: int
    """Slots whose attempts both have a verdict; the means are over them."""
    kept: Means | None = None
    first: Means | None = None
    """Means of the attempts that would have counted without speculation."""


def speculation(groups: Iterable[Group], walls: Mapping[int, float | None]) -> Speculation | None:
    """The report over some groups; None when no slot has a speculative attempt. walls: trajectory sequence to seconds
    of wall time."""
    slots = [slot for group in groups for slot in group.slots.values() if len(slot.live) > 1]
    if not slots:
        return None
    pairs = [slot for slot in slots if all(attempt.score is not None for attempt in slot.live)]

    def means(which: int) -> Means | None:
        scores = [(slot.kept if which else slot.live[0]).score for slot in pairs]
        judged = [score for score in scores if score is not None]
        seconds = [wall for score in judged if (wall := walls.get(score.trajectory_seq)) is not None]
        return Means(
            sampled_tokens=round(statistics.fmean(score.sampled_tokens for score in judged), 2),
            wall_s=round(statistics.fmean(seconds), 3) if len(seconds) == len(judged) else None,
            reward=round(statistics.fmean(score.reward for score in judged), 4),
        )

    return Speculation(
        slots=len(slots),
        second_kept=sum(slot.scored and slot.kept is not slot.live[0] for slot in slots),
        pairs=len(pairs),
        kept=means(1) if pairs else None,
        first=means(0) if pairs else None,
    )
