"""What asking for a slot twice does to the sample: the first answer is the shorter one more often than not.

A straggler's slot may be issued once more beside the attempt that runs, and whichever is scored first counts. The two
draw alike, so what is kept is the quicker of two: a policy trained on it sees shorter episodes than it plays, and if
short ones fail (or pass) more often, other rewards. The attempt that was outrun plays on to its end and is judged as
well, so both lengths are on record and the bias can be measured instead of guessed: what is kept, beside what would
have been kept had nobody asked twice, over the very same slots.

Trade-off: the outrun attempt's work is spent for this measure. That is why it is off unless it is asked for.
"""

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from headrace.replay.books import Group


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Of one attempt a slot."""

    sampled_tokens: float
    wall_s: float | None
    """None where the trajectories are purged."""
    reward: float


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Slots that were asked for a second time."""

    slots: int
    second_kept: int
    """Of these, how often the later attempt was the first to be scored."""
    pairs: int
    """Slots of which both attempts came to a verdict; the means are over them."""
    kept: Means | None = None
    first: Means | None = None
    """What would have been kept without speculation."""


def speculation(groups: Iterable[Group], walls: Mapping[int, float | None]) -> Speculation | None:
    """The report over some groups. walls: trajectory sequence to seconds."""
    slots = [slot for group in groups for slot in group.slots.values() if len(slot.live) > 1]
    if not slots:
        return None
    pairs = [slot for slot in slots if all(attempt.score is not None for attempt in slot.live)]

    def means(which: int) -> Means | None:
        scores = [(slot.kept if which else slot.live[0]).score for slot in pairs]
        known = [score for score in scores if score is not None]
        seconds = [wall for score in known if (wall := walls.get(score.trajectory_seq)) is not None]
        return Means(
            sampled_tokens=round(statistics.fmean(score.sampled_tokens for score in known), 2),
            wall_s=round(statistics.fmean(seconds), 3) if len(seconds) == len(known) else None,
            reward=round(statistics.fmean(score.reward for score in known), 4),
        )

    return Speculation(
        slots=len(slots),
        second_kept=sum(slot.scored and slot.kept is not slot.live[0] for slot in slots),
        pairs=len(pairs),
        kept=means(1) if pairs else None,
        first=means(0) if pairs else None,
    )
