"""Builds the Trajectory of an attempt from its request and turns, and publishes it."""

import time
from collections.abc import Sequence

import msgspec

from headrace.bus.connection import Bus
from headrace.harness.loop import Episode as Turns
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import RolloutRequest, Trajectory
from headrace.messages.subjects import TRAJ
from headrace.messages.tasks import Task
from headrace.policy import routes


def trajectory_of(
    request: RolloutRequest,
    task: Task,
    episode: Turns,
    *,
    bundle: str,
    fingerprint: str,
    rollout: str,
    since: float,
    plugins: Sequence[Plugin] = (),
) -> Trajectory:
    """A Trajectory without the diff and the sandbox's reports, which the caller adds.
    bundle: sha256 of the renderer's. since: `time.monotonic` of the attempt's start on this actor. plugins: those that
    the attempt used."""
    return Trajectory(
        run=request.run,
        lane=request.lane,
        group=request.group,
        slot=request.slot,
        attempt=request.attempt,
        id=request.trajectory,
        task=request.task,
        family=task.family,
        seed=request.seed,
        policy=request.policy,
        sampling=request.sampling,
        outcome=episode.outcome,
        turns=tuple(episode.turns),
        diff={},
        fingerprint=fingerprint,
        renderer=bundle,
        isolation=request.isolation,
        wall_s=round(time.monotonic() - since, 4),
        malformed_calls=sum(bool(call.error) for turn in episode.turns for call in turn.calls),
        rollout=rollout,
        altered=bool(request.prompt or request.files),
        plugins=tuple(plugins),
    )


def message_id(run: str, trajectory: str) -> str:
    """The message id under which a Trajectory is published; trajectory: its id."""
    return f"{run}.{trajectory}"


async def publish(bus: Bus, trajectory: Trajectory, first: int = 0) -> Trajectory:
    """Store a Trajectory; a repetition is dropped by its message id. BusError.

    first: of its turn log. Routes then stay there, where the trainer alone reads them. Records of users are copied into
    the branch that trains on them, so they keep their routes.
    """
    if any(turn.routed for turn in trajectory.turns):
        if first and trajectory.lane != "production":
            turns = routes.without(trajectory.turns)
            trajectory = msgspec.structs.replace(trajectory, turns=turns, turns_from=first)
        else:
            turns = tuple(map(routes.on_wire, trajectory.turns))
            trajectory = msgspec.structs.replace(trajectory, turns=turns)
    subject = TRAJ.at(run=trajectory.run, group=trajectory.group)
    await bus.publish(subject, trajectory, msg_id=message_id(trajectory.run, trajectory.id))
    return trajectory
