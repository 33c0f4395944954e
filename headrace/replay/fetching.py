"""The records of a step by sequence: what trainer and replay hand to the step, and nothing else."""

import asyncio
from collections.abc import Iterable

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.messages.codec import UnknownType
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import BatchGroup

AT_ONCE = 16
"""Requests in flight: a trajectory is up to 1 MiB, and more than these would only wait on the wire."""

Records = tuple[dict[int, Trajectory], dict[int, Score]]
"""Trajectories and Scores by stream sequence. What was purged or cannot be read is missing."""


async def fetch(bus: Bus, groups: Iterable[BatchGroup]) -> Records:
    """The Trajectory and Score of every slot of some groups."""
    gate = asyncio.Semaphore(AT_ONCE)
    trajectories: dict[int, Trajectory] = {}
    scores: dict[int, Score] = {}

    async def one(stream: str, seq: int) -> None:
        async with gate:
            try:
                message = (await bus.get(stream, seq)).message
            except (MessageGone, UnknownType):
                return
        if isinstance(message, Trajectory):
            trajectories[seq] = message
        elif isinstance(message, Score):
            scores[seq] = message

    slots = [slot for group in groups for slot in group.slots]
    await asyncio.gather(
        *(one("HR_TRAJ", trajectory) for trajectory, _ in slots), *(one("HR_SCORE", score) for _, score in slots)
    )
    return trajectories, scores
