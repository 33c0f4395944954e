"""The arithmetic of bounded staleness: which groups may be issued, the batch of a group, the age of a token.

Batch k has P groups; its step turns version k into version k + 1. A token's staleness is k minus the version that
sampled it. Admission follows AReaL (arXiv 2505.24298) in groups instead of samples: with at most (bound + 1) x P groups
issued and not retired, group number i is in batch i // P at the latest, so a sampler at version max(0, i // P - bound)
or newer samples no token that becomes too old. Law 2 rests on these functions; curriculum, trainer and audit call the
same ones.

The bound may change during a run (`Bounds`). A change names its first batch, which has no GroupClosed record yet, so
that a bound never applies to a batch that closed before it. A smaller bound applies at once. A larger bound grows by
one per batch, from the value before the change: the trainer has deleted versions beyond the old bound and could not
score their tokens again. In both cases k - bound(k) never decreases, so the last batch of a version is well defined.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Bounds(NamedTuple):
    """The bound of every batch. changes: (first batch, bound asked for), ascending; the first is of batch 0."""

    changes: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, bound: int) -> "Bounds":
        """One bound for a whole run."""
        return cls(((0, bound),))

    def changed(self, batch: int, bound: int) -> "Bounds":
        """These bounds with another one from a batch on. ValueError for a negative bound or a batch before the last
        change."""
        if bound < 0 or batch < self.changes[-1][0]:
            raise ValueError(
                f"expected a bound >= 0 from batch {self.changes[-1][0]} or a later one on, got {bound} from batch "
                f"{batch}"
            )
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

    closed: number of GroupClosed records. index: number of the next group. A larger bound, and any bound with `drop`,
    starts with the first batch without a GroupClosed record. Without `drop`, a smaller bound starts after the batches
    of all groups that were issued.
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


def batch_of(place: int, groups_per_step: int) -> int:
    """The batch of the place-th GroupClosed record of a run."""
    return place // groups_per_step


def places(batch: int, groups_per_step: int) -> range:
    """The indices of a batch's records among the GroupClosed records of a run."""
    return range(batch * groups_per_step, (batch + 1) * groups_per_step)


def may_close(oldest: int, live: Iterable[int], closed: int, groups_per_step: int, bound: int | Bounds) -> bool:
    """Whether a finished group may close next without itself or another live group becoming too old.

    oldest: version of the group's oldest token. live: the same for every other group that is open, or finished but not
    closed (its min_version while it has no token). closed: number of GroupClosed records. The test is earliest deadline
    first: the other groups, ordered by their last batch, close at positions closed + 1, closed + 2, ..., and each must
    be in time. With a bound of 2 or more it is not enough to reserve positions for the groups that are due in the
    current batch: young groups could take the positions that the next batch's groups need.
    """
    bounds = Bounds.constant(bound) if isinstance(bound, int) else bound
    if bounds.last_batch(oldest) < batch_of(closed, groups_per_step):
        return False
    deadlines = sorted(bounds.last_batch(version) for version in live)
    return all(batch_of(place, groups_per_step) <= deadline for place, deadline in enumerate(deadlines, closed + 1))


def staleness(batch: int, version: int) -> int:
    """The age of a token in versions. ValueError when its version is newer than its batch."""
    if version > batch:
        raise ValueError(f"expected tokens of version {batch} or older in batch {batch}, got version {version}")
    return batch - version


def histogram(batch: int, versions: Mapping[int, int]) -> dict[str, int]:
    """Staleness, as text, to number of tokens, ascending: the figures of a StepDone. `versions`: tokens by version."""
    counts = {staleness(batch, version): count for version, count in versions.items()}
    return {str(age): counts[age] for age in sorted(counts)}
