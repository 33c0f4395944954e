"""Fetches the records of a step by sequence: the arguments that trainer and replay pass to the step."""

import asyncio
from collections.abc import Iterable

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.runtime.tracing import Link, link
from headrace.messages.codec import UnreadableMessage
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import BatchGroup

AT_ONCE = 16
"""Requests in flight: a trajectory is up to 1 MiB, so more requests would not arrive sooner."""

Records = tuple[dict[int, Trajectory], dict[int, Score]]
"""Trajectories and Scores by stream sequence. Records that were purged or cannot be read are missing."""


async def fetch(bus: Bus, groups: Iterable[BatchGroup], links: list[Link] | None = None) -> Records:
    """The Trajectory and Score of every slot of some groups. links: receives a link to the span of each trajectory."""
    gate = asyncio.Semaphore(AT_ONCE)
    trajectories: dict[int, Trajectory] = {}
    scores: dict[int, Score] = {}

    async def one(stream: str, seq: int) -> None:
        async with gate:
            try:
                received = await bus.get(stream, seq)
                message = received.message
            except (MessageGone, UnreadableMessage):
                return
        if isinstance(message, Trajectory):
            trajectories[seq] = message
            if links is not None and (origin := link(received)) is not None:
                links.append(origin)
        elif isinstance(message, Score):
            scores[seq] = message

    slots = [slot for group in groups for slot in group.slots]
    await asyncio.gather(
        *(one("HR_TRAJ", trajectory) for trajectory, _ in slots), *(one("HR_SCORE", score) for _, score in slots)
    )
    return trajectories, scores
