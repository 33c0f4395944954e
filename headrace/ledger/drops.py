"""Dropped slots by the length of their episodes: a policy whose long episodes are dropped learns to be short.

Asynchronous training finishes short episodes first. If the dropped episodes are longer than the kept ones, the policy
is trained on a biased sample, and a total such as "1 % dropped" does not show it. So slots are put into buckets of
equal size by length, in sampled tokens and in seconds, and each bucket counts its dropped slots by reason. The edges
are quantiles of all known lengths, those of dropped episodes included.

A dropped attempt usually runs to its end, so its length is known too. Attempts that never ended have no length and are
counted separately.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

BUCKETS = 4


class Fate(msgspec.Struct, frozen=True):
    """A slot: the length of its episode in sampled tokens and seconds (None while unknown), and the reason of its drop
    (empty when it was kept)."""

    tokens: float | None
    wall_s: float | None
    reason: str = ""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The slots with a length above the previous bucket's `up_to` and at most this one's."""

    up_to: float
    slots: int
    dropped: dict[str, int]


class DropsByLength(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of the train lane in buckets of about equal size, by sampled tokens and by seconds of wall time."""

    tokens: tuple[Bucket, ...] = ()
    wall_s: tuple[Bucket, ...] = ()
    unknown: dict[str, int] = {}
    """Dropped slots without a finished episode, by reason."""


def edges(lengths: Sequence[float], buckets: int = BUCKETS) -> list[float]:
    """Upper edges by nearest rank, ascending and distinct; the last one is the largest length."""
    ordered = sorted(lengths)
    ranks = [-(-len(ordered) * part // buckets) for part in range(1, buckets + 1)]
    return sorted({ordered[rank - 1] for rank in ranks if rank > 0})


def bucketed(pairs: Sequence[tuple[float, str]], buckets: int = BUCKETS) -> Iterator[Bucket]:
    """(length, reason) pairs as buckets, shortest first. A slot with an empty reason was not dropped."""
    lower = float("-inf")
    for upper in edges([length for length, _ in pairs], buckets):
        members = [reason for length, reason in pairs if lower < length <= upper]
        dropped = Counter(reason for reason in members if reason)
        yield Bucket(up_to=upper, slots=len(members), dropped=dict(sorted(dropped.items())))
        lower = upper


def by_length(fates: Sequence[Fate], buckets: int = BUCKETS) -> DropsByLength:
    """The report over some slots; its buckets are sorted by length, shortest first."""
    unknown = Counter(fate.reason for fate in fates if fate.reason and fate.tokens is None)
    return DropsByLength(
        tokens=tuple(bucketed([(f.tokens, f.reason) for f in fates if f.tokens is not None], buckets)),
        wall_s=tuple(bucketed([(f.wall_s, f.reason) for f in fates if f.wall_s is not None], buckets)),
        unknown=dict(sorted(unknown.items())),
    )
