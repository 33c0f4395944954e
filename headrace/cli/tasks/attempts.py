"""Reads the attempts of a run with their tasks, for the commands that write them in another format."""

from collections.abc import AsyncIterator
from functools import cache, partial
from typing import NamedTuple

from headrace.bus.connection import Bus
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import TRAJ
from headrace.messages.tasks import Task
from headrace.tasks import open_suite


class Attempt(NamedTuple):
    """A stored trajectory."""

    seq: int
    """Its sequence in HR_TRAJ."""
    made: Trajectory
    task: Task

    @property
    def policy(self) -> str:
        """Kind of the policy, and its name or version."""
        policy = self.made.policy
        return f"{policy.kind}:{policy.name or policy.version}"


async def attempts(bus: Bus, run: str, suites: str) -> AsyncIterator[Attempt]:
    """All attempts of a run in the order of the stream, without users' sessions. suites: folder of the suites that
    have one. UnknownSuite."""
    suite = cache(partial(open_suite, root=suites))
    async for received in bus.history("HR_TRAJ", TRAJ.where(run=run)):
        made = received.message
        if isinstance(made, Trajectory) and made.lane != "production":
            yield Attempt(received.seq, made, suite(made.task.suite).task(made.task.task))
