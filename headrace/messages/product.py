"""The product lane: users, traffic, and capacity that moves between lanes."""

from typing import Literal

from headrace.messages.base import Message, message


@message("feedback")
class Feedback(Message, frozen=True, kw_only=True):
    """A user's thumb on one production trajectory."""

    tenant: str
    user: str
    """Keyed hash of the user id; the clear id never reaches the bus."""
    run: str
    trajectory: str
    thumb: Literal["up", "down"]
    training_allowed: bool = False
    comment: str = ""


@message("traffic")
class Traffic(Message, frozen=True, kw_only=True):
    """Load of the product in one region, published every second on core NATS."""

    region: str
    active: int
    waiting: int
    requests_per_s: float
    capacity: int
    run: str = ""
    """Whose product it is; a scavenger hears its own run's."""
    server: str = ""
    """Empty: sessions of a gateway. Else what others than headrace ask of the server of this rollout actor."""


@message("capacity_lease")
class CapacityLease(Message, frozen=True, kw_only=True):
    """Which lanes a rollout actor pulls; a KV value whose revision is the fencing token."""

    rollout: str
    lanes: tuple[str, ...]
    reason: str
    since: float


def lease_key(run: str, rollout: str) -> str:
    """Key of a rollout actor's lease in HR_LEASE: ids are the configuration's, and several runs may share a broker."""
    return f"{run}.{rollout}"


@message("promotion")
class Promotion(Message, frozen=True, kw_only=True):
    """A version passed the gate and may serve production (or an earlier one returns)."""

    run: str
    version: int
    eval_id: str = ""
    rate: float = 0.0
    previous_rate: float = 0.0
    reason: str = ""


@message("purge_user")
class PurgeUser(Message, frozen=True, kw_only=True):
    """Forget a user: feedback, trajectories, turns, scores and blobs under the user's hash. Answered with an Ack."""

    user: str
