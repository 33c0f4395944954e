"""Fetches the records of a step by sequence: the arguments that trainer and replay pass to the step."""

import asyncio
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.runtime.tracing import Link, link
from headrace.messages.codec import UnreadableMessage
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory, Turn, TurnSampled
from headrace.messages.subjects import TURN
from headrace.messages.training import BatchGroup
from headrace.policy import routes

AT_ONCE = 16
"""Requests in flight: a trajectory is up to 1 MiB, so more requests would not arrive sooner."""

Records = tuple[dict[int, Trajectory], dict[int, Score]]
"""Trajectories and Scores by stream sequence. Records that were purged or cannot be read are missing."""


async def fetch(
    bus: Bus,
    groups: Iterable[BatchGroup],
    links: list[Link] | None = None,
    sizes: list[int] | None = None,
    *,
    routed: bool = True,
) -> Records:
    """The Trajectory and Score of every slot of some groups. links: receives a link to the span of each trajectory;
    sizes: receives the bytes of each record, its turn log included. routed: with the routes, which are in turn logs
    that not every role may read."""
    gate = asyncio.Semaphore(AT_ONCE)
    trajectories: dict[int, Trajectory] = {}
    scores: dict[int, Score] = {}

    async def one(stream: str, seq: int) -> None:
        async with gate:
            try:
                received = await bus.get(stream, seq)
                message = received.message
                read = [len(received.data)]
                if routed and isinstance(message, Trajectory):
                    message = await _with_routes(bus, message, read)
                if sizes is not None:
                    sizes.append(sum(read))
            except (MessageGone, UnreadableMessage, ValueError):
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


async def _with_routes(bus: Bus, trajectory: Trajectory, sizes: list[int]) -> Trajectory:
    """A stored Trajectory with the routes of its turns. ValueError when they cannot be read. sizes: gets the bytes of
    its turn log: those that are read, or about as many as the Trajectory has."""
    logged: list[Turn] = []
    if trajectory.turns_from:
        subject = TURN.at(run=trajectory.run, trajectory=trajectory.id)
        async for received in bus.history("HR_TURN", subject, start=trajectory.turns_from):
            sizes.append(len(received.data))
            if isinstance(record := received.message, TurnSampled):
                logged.append(record.turn)
    else:
        sizes.append(sizes[0])
        if all(turn.packed is UNSET for turn in trajectory.turns):
            return trajectory
    turns = await asyncio.to_thread(routes.filled, trajectory.turns, logged or trajectory.turns)
    return msgspec.structs.replace(trajectory, turns=turns)
