"""Judges recorded trajectories again with another judge version, and counts the advantages whose sign changes.

New scores are published under a run of their own, ``<run>-<judge>``. Trainers, curricula and audits of the run filter
by the run's name, so only `headrace retrain --judge` reads the new scores (`retrain.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.algorithms.advantages import group_advantages
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages.judging import Score
from headrace.messages.ledger import GroupClosed
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import CLOSE, SCORE
from headrace.messages.training import BatchGroup
from headrace.replay.fetching import fetch
from headrace.replay.recorded_run import ReplayError

Verdicts = Callable[[Trajectory, Score], Awaitable[Score]]
"""The new judge: a trajectory and its old score in, the new score out (its `run` and `judge_version` are set here)."""


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory whose advantage changed its sign; 0 counts as a sign."""

    group: str
    slot: int
    reward: float
    reward_again: float
    advantage: float
    advantage_again: float


class Rejudged(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace rejudge` prints."""

    run: str
    judge: str
    scores_run: str
    """The run under which the new scores are published."""
    groups: int
    slots: int
    verdicts_changed: int
    rewards_changed: int
    advantages_flipped: int
    """Trajectories whose advantage changed its sign; 0 counts as a sign."""
    flips: tuple[Flip, ...]


@dataclass(frozen=True)
class Judged:
    """One slot with both verdicts."""

    old: Score
    new: Score


def scores_run(run: str, judge: str) -> str:
    """The run under which the scores of another judge are published."""
    return f"{run}-{judge}"


async def closings(bus: Bus, run: str) -> list[BatchGroup]:
    """Every closed group of a run in the order that decides batches."""
    groups = []
    async for received in bus.history("HR_SCORE", CLOSE.where(run=run)):
        if isinstance(closed := received.message, GroupClosed):
            slots = tuple((slot.trajectory_seq, slot.score_seq) for slot in closed.slots)
            groups.append(BatchGroup(group=closed.group, close_seq=received.seq, slots=slots))
    return groups


async def ending(bus: Bus, run: str) -> AsyncIterator[BatchGroup]:
    """Every closed group of a run in the same order, then each further group when it is closed, without end."""
    async for received in bus.follow("HR_SCORE", CLOSE.where(run=run)):
        if isinstance(closed := received.message, GroupClosed):
            slots = tuple((slot.trajectory_seq, slot.score_seq) for slot in closed.slots)
            yield BatchGroup(group=closed.group, close_seq=received.seq, slots=slots)


async def rejudge(bus: Bus, run: str, judge: str, verdicts: Verdicts, groups: Sequence[BatchGroup]) -> Rejudged:
    """Judge groups again and publish their new scores. ReplayError if there is no group, or if records are purged."""
    if not groups:
        raise ReplayError(f"run {run} has no closed group to judge again")
    target = scores_run(run, judge)
    flips: list[Flip] = []
    slots = verdicts_changed = rewards_changed = 0
    for group in groups:
        trajectories, scores = await fetch(bus, [group], routed=False)  # a judge reads no turn log
        if len(trajectories) < len(group.slots) or len(scores) < len(group.slots):
            raise ReplayError(f"purged: group {group.group} is not in the streams any more")
        judged = []
        for trajectory_seq, score_seq in group.slots:
            new = await verdicts(trajectories[trajectory_seq], scores[score_seq])
            new = msgspec.structs.replace(new, run=target, judge_version=judge)
            subject = SCORE.at(run=target, judge=judge, group=group.group)
            await bus.publish(subject, new, msg_id=f"{target}.{trajectory_seq}.{judge}")
            judged.append(Judged(scores[score_seq], new))
        slots += len(judged)
        verdicts_changed += sum(pair.old.verdict != pair.new.verdict for pair in judged)
        rewards_changed += sum(pair.old.reward != pair.new.reward for pair in judged)
        flips += flipped(judged)
    return Rejudged(
        run=run,
        judge=judge,
        scores_run=target,
        groups=len(groups),
        slots=slots,
        verdicts_changed=verdicts_changed,
        rewards_changed=rewards_changed,
        advantages_flipped=len(flips),
        flips=tuple(flips),
    )


def flipped(group: Sequence[Judged]) -> list[Flip]:
    """The slots of one group whose advantage has another sign."""
    before = group_advantages([pair.old.reward for pair in group])
    after = group_advantages([pair.new.reward for pair in group])
    return [
        Flip(
            group=pair.old.group,
            slot=pair.old.slot,
            reward=pair.old.reward,
            reward_again=pair.new.reward,
            advantage=advantage,
            advantage_again=advantage_again,
        )
        for pair, advantage, advantage_again in zip(group, before, after, strict=True)
        if _sign(advantage) != _sign(advantage_again)
    ]


def _sign(value: float) -> int:
    return (value > 0.0) - (value < 0.0)


async def scores_of(bus: Bus, run: str, judge: str) -> Mapping[tuple[str, int, int], Score]:
    """The scores of another judge by (group, slot, attempt). ReplayError if it has not judged the run."""
    scores: dict[tuple[str, int, int], Score] = {}
    async for received in bus.history("HR_SCORE", SCORE.where(run=scores_run(run, judge), judge=judge)):
        if isinstance(score := received.message, Score):
            scores[score.group, score.slot, score.attempt] = score
    if not scores:
        raise ReplayError(f"judge {judge} has not judged run {run}: run `headrace rejudge {run} --judge {judge}` first")
    return scores


class LiveScores:
    """The scores of another judge as they arrive: `found` grows while `follow` runs, `more` waits for the next."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int], Score] = {}
        self._news = asyncio.Event()
        self._failure: BusError | None = None

    async def follow(self, bus: Bus, run: str, judge: str) -> None:
        """Collect the scores, without end. A failure of the broker is raised by `more`."""
        try:
            async for received in bus.follow("HR_SCORE", SCORE.where(run=scores_run(run, judge), judge=judge)):
                if isinstance(score := received.message, Score):
                    self.found[score.group, score.slot, score.attempt] = score
                    self._news.set()
        except BusError as error:
            self._failure = error
            self._news.set()

    async def more(self) -> None:
        """Wait for the next score. BusError when `follow` has ended."""
        self._news.clear()
        if self._failure is None:
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
