"""The curriculum's next decisions, as a pure function of the run state.

The curriculum issues groups while there is credit, issues failed slots again, closes finished groups, and drops groups
that can no longer be trained on. A decision depends on recorded facts alone, so a successor that rebuilds the state
from the streams makes the same decisions as the curriculum that was killed.

The order of closings decides the batches, and a token's staleness is its batch minus its version. Among the finished
groups the one with the oldest token closes first, and only if every other open group can still be placed in time
(earliest deadline first, `algorithms.staleness.may_close`). An open group without a verdict counts with its
`min_version`, the oldest version that may have sampled it. At most one batch after the current one is filled, so that
a group that finishes in the meantime can still be placed before younger ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.algorithms import staleness
from headrace.algorithms.staleness import Bounds
from headrace.config import Curriculum
from headrace.ledger.state import Group, RunState, Slot
from headrace.messages.ledger import ClosedSlot, GroupClosed, GroupDropped

SURVIVORS = 2
"""A group closes with at least this many scored slots: a baseline needs more than one."""


class Rules(NamedTuple):
    """The curriculum's section of the configuration."""

    group_size: int
    groups_per_step: int
    bound: int
    """The staleness bound until the run's first StalenessBound."""
    steps: int
    attempts: int
    on_stale: Literal["wait", "drop"]
    replace_flat: int = 0
    """Largest number of groups with equal rewards that are dropped instead of closed, per batch that has begun."""

    @classmethod
    def of(cls, section: Curriculum) -> "Rules":
        """The rules of a run's `[curriculum]` section."""
        return cls(
            section.group_size,
            section.groups_per_step,
            section.staleness,
            section.steps,
            section.attempts,
            section.on_stale,
            section.replace_flat,
        )


@dataclass(frozen=True, slots=True)
class IssueGroup:
    """Issue these slots of a group: all slots of a new group, or the missing ones after a crash."""

    group: str
    number: int
    """Ordinal of the group in its run, dropped groups included: its position in the task order."""
    index: int
    min_version: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RetrySlot:
    """Issue one slot again."""

    group: str
    slot: int
    attempt: int
    min_version: int
    reason: str


Decision = IssueGroup | RetrySlot | GroupClosed | GroupDropped


def group_name(number: int) -> str:
    """Name of a group of the train lane by its ordinal."""
    return f"g{number:06d}"


def finished(state: RunState, rules: Rules) -> bool:
    """Whether the run has taken its steps and no group is open."""
    return state.steps >= rules.steps and not state.open


def awaited(state: RunState, rules: Rules) -> str:
    """The records without which the run does not go on, in words."""
    if groups := list(state.open.values()):
        return f"{groups[0].missing}, and those of {len(groups) - 1} more groups"
    if state.steps < rules.steps:
        return f"step {state.steps} of the trainer"
    return f"evaluations, or an engine that serves version {state.steps}"


def decide(state: RunState, rules: Rules, offered: Sequence[str] | None = None) -> list[Decision]:
    """The next decisions. The caller applies them before it calls again; an empty list means: wait for a record.

    offered: names of clients' groups that are not issued, in the order in which they came; None in a run that takes its
    tasks from a suite."""
    if state.steps >= rules.steps:
        return [_drop(group, "cancelled", "the run has taken its steps") for group in state.open.values()]
    retries = _retries(state, rules)
    if retries:
        return retries
    close = _close(state, rules)
    if close is not None:
        return [close]
    group = _next_group(state, rules, offered)
    return [group] if group is not None else []


_Reason = Literal["stale", "infra", "cancelled", "quarantined", "flat"]


def _drop(group: Group, reason: _Reason, detail: str) -> GroupDropped:
    first = group.first
    return GroupDropped(run=first.run, group=group.name, reason=reason, detail=detail, group_size=first.group_size)


def bounds_of(state: RunState, rules: Rules) -> Bounds:
    """The bound of every batch: from the run's StalenessBound records, or the configured one when there are none."""
    return state.bounds or Bounds.constant(rules.bound)


def _retries(state: RunState, rules: Rules) -> list[Decision]:
    """A new attempt for every failed slot that has attempts left. Its tokens cannot be in a batch that is over, so it
    samples from the oldest version that the next place can take, or a newer one."""
    floor = _floor(state, rules)
    return [
        RetrySlot(group.name, number, slot.last.number + 1, max(group.first.min_version, floor), slot.last.failed)
        for group in state.open.values()
        for number, slot in group.slots.items()
        if slot.failed and not _ended(slot, rules)
    ]


def _floor(state: RunState, rules: Rules) -> int:
    """The oldest version that the next place can take."""
    batch = staleness.batch_of(len(state.closings), rules.groups_per_step)
    return batch - bounds_of(state, rules).at(batch)


def _done(group: Group, rules: Rules) -> bool:
    """Whether every slot is scored or has failed for good."""
    return len(group.slots) == group.first.group_size and all(
        slot.scored or _ended(slot, rules) for slot in group.slots.values()
    )


def _ended(slot: Slot, rules: Rules) -> bool:
    """Whether a slot has failed for good."""
    return slot.failed and slot.last.final(rules.attempts)


def _doubtful(slot: Slot) -> bool:
    """Whether the judge gave two different verdicts: then no verdict from the same machine is trusted."""
    score = slot.last.score
    return score is not None and score.again == "other"


def _survivors(group: Group) -> list[ClosedSlot]:
    survivors = []
    for number, slot in sorted(group.slots.items()):
        attempt = slot.last
        if attempt.score is not None:
            oldest = attempt.score.oldest_version
            survivors.append(
                ClosedSlot(
                    slot=number,
                    attempt=attempt.number,
                    trajectory_seq=attempt.score.trajectory_seq,
                    score_seq=attempt.score_seq,
                    reward=attempt.score.reward,
                    oldest_version=oldest if oldest >= 0 else group.first.min_version,
                )
            )
    return survivors


def oldest_of(group: Group, rules: Rules) -> int:
    """Version of the group's oldest token; for an unfinished group the oldest version that may have sampled one."""
    if _done(group, rules):
        return min((slot.oldest_version for slot in _survivors(group)), default=group.first.min_version)
    return group.first.min_version


def _close(state: RunState, rules: Rules) -> Decision | None:
    """The next closing or drop; None when the next place must not be filled yet."""
    place, per_step, bounds = len(state.closings), rules.groups_per_step, bounds_of(state, rules)
    ready: list[tuple[int, Group]] = []
    waiting: list[tuple[int, Group]] = []
    for group in state.open.values():
        done = _done(group, rules)
        if done and (doubtful := [n for n, slot in group.slots.items() if _doubtful(slot)]):
            return _drop(group, "quarantined", f"slot {doubtful[0]} has two verdicts")
        if done and len(_survivors(group)) < SURVIVORS:
            return _drop(group, "infra", f"{len(_survivors(group))} of {group.first.group_size} slots have a score")
        if done and _flat(group) and state.flat < rules.replace_flat * (staleness.batch_of(place, per_step) + 1):
            return _drop(group, "flat", f"all {len(_survivors(group))} rewards are {_survivors(group)[0].reward:g}")
        oldest = oldest_of(group, rules)
        if done and bounds.last_batch(oldest) < staleness.batch_of(place, per_step):
            return _drop(group, "stale", f"version {oldest} sampled a token; the next batch is too late for it")
        (ready if done else waiting).append((oldest, group))
    if not ready or place >= min(state.steps + 2, rules.steps) * per_step:
        return None
    oldest, first = min(ready, key=lambda pair: pair[0])  # of equal versions the group that was issued first
    others = [version for version, group in [*ready, *waiting] if group is not first]
    if staleness.may_close(oldest, others, place, per_step, bounds):
        return _closing(first, rules)
    all_open = [*ready, *waiting]
    too_late = _too_late([version for version, _ in all_open], place, per_step, bounds)
    if too_late is None:
        needed = state.steps == staleness.batch_of(place, per_step) and len(ready) >= per_step - place % per_step
        if rules.on_stale == "wait" or not needed:
            return None
        too_late = _too_late(others, place + 1, per_step, bounds)
    within = [pair for pair in waiting if pair[0] <= (too_late or 0)]
    if within:
        stale = min(within, key=lambda pair: (pair[0], sum(slot.scored for slot in pair[1].slots.values())))[1]
        return _drop(stale, "stale", f"unfinished while place {place} is needed")
    stale = [group for version, group in ready if version <= (too_late or 0)][-1]
    return _drop(stale, "stale", f"place {place} and the ones after it are taken by tokens as old")


def _flat(group: Group) -> bool:
    """Whether all rewards are equal, those of turns too: they then give no advantage."""
    scores = [score for slot in group.slots.values() if (score := slot.last.score) is not None]
    turns = {reward for score in scores for reward in score.turn_rewards}
    return len({score.final_reward for score in scores}) == 1 and len(turns) < 2


def _too_late(versions: Iterable[int], place: int, per_step: int, bounds: Bounds) -> int | None:
    """The version of the first group that would be too late; None when all are in time.

    Groups with these versions are placed earliest deadline first, from `place` on.
    """
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


def _next_group(state: RunState, rules: Rules, offered: Sequence[str] | None) -> IssueGroup | None:
    """A group whose issue a crash interrupted; otherwise a new group, while credit and the run's length allow one."""
    for group in state.open.values():
        missing = tuple(slot for slot in range(group.first.group_size) if slot not in group.slots)
        if missing:
            number = int(group.name[1:]) if offered is None else state.issued
            return IssueGroup(group.name, number, group.first.index, group.first.min_version, missing)
    if state.index >= rules.steps * rules.groups_per_step:
        return None
    bounds = bounds_of(state, rules)
    bound = bounds.at(staleness.batch_of(state.index, rules.groups_per_step))
    if not staleness.credit(state.issued, state.retired, rules.groups_per_step, bound):
        return None
    oldest = bounds.min_version(state.index, rules.groups_per_step)
    if offered is not None and not offered:
        return None
    name = group_name(state.issued) if offered is None else offered[0]
    return IssueGroup(name, state.issued, state.index, oldest, tuple(range(rules.group_size)))
