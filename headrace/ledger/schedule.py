"""What a curriculum does next, as a pure function of the book.

Issue while there is credit, issue a failed slot again, close what is finished, drop what can no longer be trained on.
A decision follows from recorded facts alone, so a successor that rebuilt the book from the streams goes on exactly
where its predecessor was killed, and nobody has to be told what was under way.

Closings are the delicate part: they decide batches, and a token's staleness is its batch minus its version. Among
finished groups the one with the oldest token goes first, and only if every other live group still finds a place in
time (earliest deadline first, `algorithms.staleness.may_close`). A live group without a verdict is counted with its
`min_version`, the oldest that may have sampled it. At most one batch beyond the one in work is filled: what finishes
meanwhile can still be put in front of younger groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.algorithms import staleness
from headrace.algorithms.staleness import Bounds
from headrace.messages.ledger import ClosedSlot, GroupClosed, GroupDropped
from headrace.replay.books import Book, Group, Slot

SURVIVORS = 2
"""A baseline needs company: a group closes with at least so many scored slots."""


class Rules(NamedTuple):
    """The curriculum's section of the configuration."""

    group_size: int
    groups_per_step: int
    bound: int
    """Until the streams say one."""
    steps: int
    attempts: int
    on_stale: Literal["wait", "drop"]
    speculate: int = 0
    """Slots of a group that are asked for a second time when they are the last to run."""


@dataclass(frozen=True, slots=True)
class Issue:
    """Write SlotIssued for these slots of a group (all of a new one, the missing ones of one cut short)."""

    group: str
    number: int
    """Ordinal of the group in its run, dropped ones counted: the position in the task order."""
    index: int
    min_version: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """Issue one slot again."""

    group: str
    slot: int
    attempt: int
    min_version: int
    reason: str
    beside: bool = False
    """The attempt before it goes on."""


Decision = Issue | Again | GroupClosed | GroupDropped


def group_name(number: int) -> str:
    """Name of a group of the train lane by its ordinal."""
    return f"g{number:06d}"


def finished(book: Book, rules: Rules) -> bool:
    """Whether the run has taken its steps and nothing is open any more."""
    return book.steps >= rules.steps and not book.open


def decide(book: Book, rules: Rules) -> list[Decision]:
    """The next decisions, to be carried out and entered before asking again; empty means: wait for news."""
    if book.steps >= rules.steps:
        return [_drop(group, "cancelled", "the run has taken its steps") for group in book.open.values()]
    again = _again(book, rules)
    if again:
        return again
    close = _close(book, rules)
    if close is not None:
        return [close]
    beside = _beside(book, rules)
    if beside:
        return beside
    issue = _issue(book, rules)
    return [issue] if issue is not None else []


_Reason = Literal["stale", "infra", "cancelled", "quarantined", "canary"]


def _drop(group: Group, reason: _Reason, detail: str) -> GroupDropped:
    first = group.first
    return GroupDropped(run=first.run, group=group.name, reason=reason, detail=detail, group_size=first.group_size)


def bounds_of(book: Book, rules: Rules) -> Bounds:
    """The bound of every batch: as the run's closings say, else as configured."""
    return book.bounds or Bounds.constant(rules.bound)


def _again(book: Book, rules: Rules) -> list[Decision]:
    """Failed slots that have attempts left. A batch that is already over needs no tokens: the new attempt starts from
    the oldest version that the next place can take."""
    floor = _floor(book, rules)
    return [
        Again(group.name, number, slot.last.number + 1, max(group.first.min_version, floor), slot.last.failed)
        for group in book.open.values()
        for number, slot in group.slots.items()
        if slot.failed and slot.last.number + 1 < rules.attempts
    ]


def _floor(book: Book, rules: Rules) -> int:
    """The oldest version that the next place can take."""
    batch = staleness.batch_of(len(book.closings), rules.groups_per_step)
    return batch - bounds_of(book, rules).at(batch)


def _beside(book: Book, rules: Rules) -> list[Decision]:
    """The last slots of a group once more, beside the attempts that run: when, is known from the records alone."""
    found: list[Decision] = []
    for group in book.open.values() if rules.speculate else ():
        left = {number: slot for number, slot in group.slots.items() if not slot.scored}
        if len(group.slots) < group.first.group_size or len(left) > rules.speculate:
            continue
        oldest = max(group.first.min_version, _floor(book, rules))
        found += [
            Again(group.name, number, slot.last.number + 1, oldest, "speculative", beside=True)
            for number, slot in left.items()
            if len(slot.live) == 1 and not slot.failed and slot.last.number + 1 < rules.attempts
        ]
    return found


def _done(group: Group, rules: Rules) -> bool:
    """Whether every slot is scored or has used up its attempts."""
    return len(group.slots) == group.first.group_size and all(
        slot.scored or (slot.failed and slot.last.number + 1 >= rules.attempts) for slot in group.slots.values()
    )


def _doubtful(slot: Slot) -> bool:
    """Whether the judge contradicted itself: then nothing that shared the machine can be believed."""
    score = slot.kept.score
    return score is not None and score.again == "other"


def _caught(group: Group) -> int:
    """Attempts at a canary that its judge calls cheating."""
    scores = [slot.kept.score for slot in group.slots.values() if slot.scored]
    return sum(score is not None and score.verdict == "cheating" for score in scores)


def _survivors(group: Group) -> list[ClosedSlot]:
    found = []
    for number, slot in sorted(group.slots.items()):
        attempt = slot.kept
        if attempt.score is not None:
            oldest = attempt.score.oldest_version
            found.append(
                ClosedSlot(
                    slot=number,
                    attempt=attempt.number,
                    trajectory_seq=attempt.score.trajectory_seq,
                    score_seq=attempt.score_seq,
                    reward=attempt.score.reward,
                    oldest_version=oldest if oldest >= 0 else group.first.min_version,
                )
            )
    return found


def oldest_of(group: Group, rules: Rules) -> int:
    """Version of the group's oldest token: known when it is finished, else the oldest that may have sampled it."""
    if _done(group, rules):
        return min((slot.oldest_version for slot in _survivors(group)), default=group.first.min_version)
    return group.first.min_version


def _close(book: Book, rules: Rules) -> Decision | None:
    """The next closing or dropping, or None when the next place is not to be filled yet."""
    place, per_step, bounds = len(book.closings), rules.groups_per_step, bounds_of(book, rules)
    ready: list[tuple[int, Group]] = []
    waiting: list[tuple[int, Group]] = []
    for group in book.open.values():
        done = _done(group, rules)
        if group.first.task.canary:  # never trained on, so it takes nobody's place
            if done:
                return _drop(group, "canary", f"{_caught(group)} of {group.first.group_size} passed what none can")
            continue
        if done and (doubtful := [n for n, slot in group.slots.items() if _doubtful(slot)]):
            return _drop(group, "quarantined", f"slot {doubtful[0]} has two verdicts")
        if done and len(_survivors(group)) < SURVIVORS:
            return _drop(group, "infra", f"{len(_survivors(group))} of {group.first.group_size} slots survived")
        oldest = oldest_of(group, rules)
        if done and bounds.last_batch(oldest) < staleness.batch_of(place, per_step):
            return _drop(group, "stale", f"version {oldest} wrote a token and the next place is in a later batch")
        (ready if done else waiting).append((oldest, group))
    if not ready or place >= min(book.steps + 2, rules.steps) * per_step:
        return None
    oldest, first = min(ready, key=lambda pair: pair[0])  # of equals the one issued first
    others = [version for version, group in [*ready, *waiting] if group is not first]
    if staleness.may_close(oldest, others, place, per_step, bounds):
        return _closing(first, rules)
    everyone = [*ready, *waiting]
    too_late = _too_late([version for version, _ in everyone], place, per_step, bounds)
    if too_late is None:
        needed = book.steps == staleness.batch_of(place, per_step) and len(ready) >= per_step - place % per_step
        if rules.on_stale == "wait" or not needed:
            return None
        too_late = _too_late(others, place + 1, per_step, bounds)
    within = [pair for pair in waiting if pair[0] <= (too_late or 0)]
    if within:
        stale = min(within, key=lambda pair: (pair[0], sum(slot.scored for slot in pair[1].slots.values())))[1]
        return _drop(stale, "stale", f"unfinished while place {place} is needed")
    stale = [group for version, group in ready if version <= (too_late or 0)][-1]
    return _drop(stale, "stale", f"place {place} and the ones after it are taken by tokens as old")


def _too_late(versions: Iterable[int], place: int, per_step: int, bounds: Bounds) -> int | None:
    """Earliest deadline first from a place on: the version of the first group that comes too late, None when none."""
    for at, version in enumerate(sorted(versions), place):
        if bounds.last_batch(version) < staleness.batch_of(at, per_step):
            return version
    return None


def _closing(group: Group, rules: Rules) -> GroupClosed:
    survivors = _survivors(group)
    named = {slot.slot for slot in survivors}
    return GroupClosed(
        run=group.first.run,
        group=group.name,
        task=group.first.task,
        group_size=group.first.group_size,
        slots=tuple(survivors),
        dropped_slots={str(number): "infra" for number in sorted(group.slots) if number not in named},
        oldest_version=min(slot.oldest_version for slot in survivors),
    )


def _issue(book: Book, rules: Rules) -> Issue | None:
    """A group that was cut short first, then a new one while credit and the run's length allow it."""
    for group in book.open.values():
        missing = tuple(slot for slot in range(group.first.group_size) if slot not in group.slots)
        if missing:
            return Issue(group.name, int(group.name[1:]), group.first.index, group.first.min_version, missing)
    if book.index >= rules.steps * rules.groups_per_step:
        return None
    bounds = bounds_of(book, rules)
    bound = bounds.at(staleness.batch_of(book.index, rules.groups_per_step))
    if not staleness.credit(book.issued, book.retired, rules.groups_per_step, bound):
        return None
    oldest = bounds.min_version(book.index, rules.groups_per_step)
    return Issue(group_name(book.issued), book.issued, book.index, oldest, tuple(range(rules.group_size)))
