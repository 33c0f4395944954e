"""The arithmetic of bounded staleness: which groups may be issued, the batch of a group, the age of a token.

Batch k is made of P groups and takes version k to version k + 1. A token's staleness is k minus the version that wrote
it. Admission follows AReaL (arXiv 2505.24298) in groups instead of samples: with at most (bound + 1) x P groups issued
and not retired, group number i ends up in batch i // P at the latest place, so a sampler at version
max(0, i // P - bound) or newer can write nothing that is too old. Law 2 rests on these functions; curriculum, trainer
and audit call the same ones.

The bound may change while a run goes on (`Bounds`). A change names the first batch that it holds for, one without a
closing yet, so that a bound never holds for a batch that closed before it. A smaller bound holds at once. A larger one
grows by one a batch, from that of its first batch as it was before: the trainer has deleted versions beyond the old
bound and could not score their tokens again. Either way k - bound(k) never falls, so a version's last batch is well
defined.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Bounds(NamedTuple):
    """The bound of every batch. changes: (first batch, bound asked for), ascending; the first is of batch 0."""

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, bound: int) -> "Bounds":
        """One bound for a whole run."""
        return cls(((0, bound),))

    def changed(self, batch: int, bound: int) -> "Bounds":
        """With another bound from a batch on. ValueError when it is negative, or when a later change is known."""
        if bound < 0 or batch < self.changes[-1][0]:
            raise ValueError(f"a bound of {bound} from batch {batch} on cannot follow {self.changes[-1]}")
        return Bounds((*self.changes, (batch, bound)))

    def at(self, batch: int) -> int:
        """The bound that holds for a batch."""
        first, asked = self.changes[0]
        base = asked
        for start, bound in self.changes[1:]:
            if start > batch:
                break
            first, asked, base = start, bound, min(bound, asked, base + start - first)
        return min(asked, base + batch - first)

    def last_batch(self, version: int) -> int:
        """The last batch in which tokens of this version may still be trained on."""
        batch = version + max(bound for _, bound in self.changes)
        while batch > version and batch - self.at(batch) > version:
            batch -= 1
        return batch

    def min_version(self, index: int, groups_per_step: int) -> int:
        """The oldest version that may sample group number `index` (dropped ones not counted)."""
        batch = batch_of(index, groups_per_step)
        return max(0, batch - self.at(batch))


def first_batch_of(bounds: Bounds, bound: int, closed: int, index: int, groups_per_step: int, *, drop: bool) -> int:
    """The first batch that a changed bound may hold for.

    closed: places taken. index: number of the next group. A larger bound, and any with `drop`, starts with the first
    batch without a closing; a smaller one otherwise waits until every group that was issued has its place.
    """
    first, free = (max(bounds.changes[-1][0], -(-taken // groups_per_step)) for taken in (closed, index))
    falls = any(bound < bounds.at(batch) for batch in range(first, free))
    return free if falls and not drop else first


def credit(issued: int, retired: int, groups_per_step: int, bound: int) -> int:
    """Groups that may be issued now, never negative: (bound + 1) x P - (issued - retired).

    A group is retired by the StepDone or StepFailed of its batch, or by GroupDropped.
    """
    if retired > issued:
        raise ValueError(f"{retired} groups retired but only {issued} issued")
    return max(0, (bound + 1) * groups_per_step - (issued - retired))


def min_version(index: int, groups_per_step: int, bound: int) -> int:
    """The oldest version that may sample group number `index` (dropped ones not counted)."""
    return max(0, index // groups_per_step - bound)


def batch_of(place: int, groups_per_step: int) -> int:
    """The batch of the place-th GroupClosed record of a run."""
    return place // groups_per_step


def places(batch: int, groups_per_step: int) -> range:
    """The places in the order of GroupClosed records that make up a batch."""
    return range(batch * groups_per_step, (batch + 1) * groups_per_step)


def last_batch(oldest_version: int, bound: int) -> int:
    """The last batch in which tokens of this version may still be trained on."""
    return oldest_version + bound


def may_close(oldest: int, live: Iterable[int], closed: int, groups_per_step: int, bound: int | Bounds) -> bool:
    """Whether a finished group may take the next place without making itself or another live group too old.

    oldest: version of the group's oldest token. live: the same for every other open or finished but unclosed group
    (its min_version while it has no token). closed: places taken so far. Earliest deadline first decides: with the
    others in order of their last batch, the i-th still has to find place closed + i. Keeping places for the current
    batch's deadlines alone is not enough for a bound of 2 or more: young groups may then take the places of the next
    batch's.
    """
    bounds = Bounds.constant(bound) if isinstance(bound, int) else bound
    if bounds.last_batch(oldest) < batch_of(closed, groups_per_step):
        return False
    deadlines = sorted(bounds.last_batch(version) for version in live)
    return all(batch_of(place, groups_per_step) <= deadline for place, deadline in enumerate(deadlines, closed + 1))


def staleness(batch: int, version: int) -> int:
    """How many versions old a token is. ValueError when it was written by a version not yet made."""
    if version > batch:
        raise ValueError(f"version {version} cannot have written tokens of batch {batch}")
    return batch - version


def histogram(batch: int, versions: Iterable[int]) -> dict[str, int]:
    """Staleness, as text, to number of tokens, ascending: the figures of a StepDone. `versions`: one per token."""
    counts = Counter(staleness(batch, version) for version in versions)
    return {str(age): counts[age] for age in sorted(counts)}
