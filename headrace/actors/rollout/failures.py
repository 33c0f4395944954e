"""Reasons for which an attempt ends without a Trajectory, and their names in SlotFailed."""

from headrace.actors.rollout.pins import NoPolicy
from headrace.engines.base import EngineError
from headrace.errors import HeadraceError
from headrace.messages.rollout import RolloutRequest, SlotFailed
from headrace.messages.sandbox import NoCapacity, SandboxLost
from headrace.messages.search import SearchLost
from headrace.tasks.diff import TreeTooLarge


class Cancelled(HeadraceError):
    """The user ended the attempt before its first turn, or had the attempt's data purged."""

    def __init__(self, purged: bool) -> None:
        super().__init__("the user's data is purged" if purged else "the user cancelled the run")
        self.purged = purged


class NoEnvironment(HeadraceError):
    """No environment node answered within `[rollout] node_wait_s`."""


class HarnessFailed(HeadraceError):
    """The harness ended before its first turn: its bundle or its command does not work in this sandbox."""


FAILURES = (
    HarnessFailed,
    Cancelled,
    SandboxLost,
    EngineError,
    SearchLost,
    NoPolicy,
    TreeTooLarge,
    NoEnvironment,
    NoCapacity,
)
"""The code of such a class is the reason in SlotFailed, also for its subclasses."""


def failure(request: RolloutRequest, error: Exception, rollout: str) -> SlotFailed:
    """The record of an attempt that ended with one of `FAILURES`. rollout: id of the actor."""
    return SlotFailed(
        run=request.run,
        lane=request.lane,
        group=request.group,
        slot=request.slot,
        attempt=request.attempt,
        reason=next(kind.code for kind in FAILURES if isinstance(error, kind)),
        detail=str(error),
        rollout=rollout,
    )
