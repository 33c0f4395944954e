"""Reasons for which an attempt ends without a Trajectory, and their names in SlotFailed."""

from headrace.actors.rollout.pins import NoPolicy
from headrace.engines.base import EngineError
from headrace.messages.rollout import RolloutRequest, SlotFailed
from headrace.messages.sandbox import SandboxLost
from headrace.messages.search import SearchLost
from headrace.tasks.diff import TreeTooLarge

CANCELLED, PURGED = "the user cancelled the run", "the user's data is purged"


class Cancelled(Exception):
    """The user ended the attempt before its first turn, or had the attempt's data purged."""


class NoEnvironment(Exception):
    """No environment node answered within `[rollout] node_wait_s`."""


class NoFreeNode(Exception):
    """No environment node had free capacity within `[rollout] wait_s`."""


REASONS: tuple[tuple[type[Exception], str], ...] = (
    (Cancelled, "cancelled"),
    (SandboxLost, "sandbox_lost"),
    (EngineError, "engine_error"),
    (SearchLost, "search_lost"),
    (NoPolicy, "no_policy"),
    (TreeTooLarge, "tree_too_large"),
    (NoEnvironment, "no_environment"),
    (NoFreeNode, "no_capacity"),
)


def failure(request: RolloutRequest, error: Exception, rollout: str) -> SlotFailed:
    """The record of an attempt that ended with one of `REASONS`. rollout: id of the actor."""
    return SlotFailed(
        run=request.run,
        lane=request.lane,
        group=request.group,
        slot=request.slot,
        attempt=request.attempt,
        reason=next(reason for kind, reason in REASONS if isinstance(error, kind)),
        detail=str(error),
        rollout=rollout,
    )
