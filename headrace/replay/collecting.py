"""Rejection sampling from a recorded run: the attempts with a high reward, as recorded ids."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.messages.rollout import Trajectory
from headrace.replay.fetching import fetch
from headrace.replay.rejudge import closings
from headrace.training.data.trajectories import Segment, tokenizer_hash


class Wanted(NamedTuple):
    """Which attempts."""

    reward: float
    """The smallest."""
    per_task: int
    """Most attempts of one task: the first ones in the order of the closed groups."""


async def attempts(bus: Bus, run: str, tokenizer_json: str, wanted: Wanted) -> AsyncIterator[list[bytes]]:
    """The lines of each wanted attempt, group after group; records that were purged are left out."""
    tokenizer, taken = tokenizer_hash(tokenizer_json), Counter[tuple[str, str]]()
    for group in await closings(bus, run):
        trajectories, scores = await fetch(bus, [group])
        for trajectory_seq, score_seq in group.slots:
            trajectory, score = trajectories.get(trajectory_seq), scores.get(score_seq)
            if trajectory is None or score is None or score.reward < wanted.reward:
                continue
            task = (trajectory.task.suite, trajectory.task.task)
            if taken[task] < wanted.per_task:
                taken[task] += 1
                yield [msgspec.json.encode(part) + b"\n" for part in segments(trajectory, score.reward, tokenizer)]


def segments(trajectory: Trajectory, reward: float, tokenizer: str) -> list[Segment]:
    """The segments of an attempt: the concatenation of what was shown and sampled, as it is recorded."""
    ids: dict[int, list[int]] = {}
    sampled: dict[int, list[tuple[int, int]]] = {}
    for turn in trajectory.turns:
        own = ids.setdefault(turn.segment, [])
        own += map(int, turn.prompt_ids.tolist())
        begin = len(own)
        own += map(int, turn.ids.tolist())
        sampled.setdefault(turn.segment, []).append((begin, len(own)))
    return [
        Segment(
            ids=own,
            sampled=sampled[number],
            trajectory=trajectory.id,
            segment=number,
            task=f"{trajectory.task.suite}/{trajectory.task.task}",
            reward=reward,
            tokenizer=tokenizer,
        )
        for number, own in ids.items()
    ]
