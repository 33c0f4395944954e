"""The books: what was issued, how groups end."""

from typing import Literal

import msgspec

from headrace.messages.base import Message, message
from headrace.messages.rollout import Lane
from headrace.messages.tasks import TaskRef


@message("slot_issued")
class SlotIssued(Message, frozen=True, kw_only=True):
    """Written before the request of an attempt; with attempt > 0 it reopens the same slot."""

    run: str
    lane: Lane
    group: str
    index: int
    """Number of the group in its run, dropped ones not counted; decides `min_version`."""
    slot: int
    attempt: int
    group_size: int
    task: TaskRef
    seed: int
    min_version: int
    beside: bool = False
    """The attempt before it is not over: whichever is scored first counts."""


class ClosedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that survived: where its Trajectory and Score stand."""

    slot: int
    attempt: int
    trajectory_seq: int
    score_seq: int
    reward: float
    oldest_version: int


@message("group_closed")
class GroupClosed(Message, frozen=True, kw_only=True):
    """A group that may be trained on; its place in HR_SCORE's order decides its batch."""

    run: str
    group: str
    task: TaskRef
    group_size: int
    slots: tuple[ClosedSlot, ...]
    dropped_slots: dict[str, str] = {}
    """Slot number (as text) to the reason for which it is not among `slots`."""
    oldest_version: int


@message("group_dropped")
class GroupDropped(Message, frozen=True, kw_only=True):
    """A group that will never be trained on. All its slots count as dropped for `reason`."""

    run: str
    group: str
    reason: Literal["stale", "infra", "cancelled", "quarantined", "canary"]
    detail: str = ""
    group_size: int


@message("staleness_bound")
class StalenessBound(Message, frozen=True, kw_only=True):
    """The bound that holds from a batch on; it stands in the order of the closings, so everybody reads the same law.

    Growing, it takes one batch for each version more (`algorithms.staleness.Bounds`).
    """

    run: str
    bound: int
    first_batch: int
    """A batch without a closing when this was written."""
    asked_seq: int = 0
    """The BoundAsked in HR_EVENT that it answers; 0 for the one from the configuration."""


@message("bound_asked")
class BoundAsked(Message, frozen=True, kw_only=True):
    """An operator asks for another staleness bound; the curriculum answers with a StalenessBound."""

    run: str
    bound: int


@message("fence")
class Fence(Message, frozen=True, kw_only=True):
    """An actor took over the books of a run. Later writes name this record's sequence; older holders are refused."""

    run: str
    actor: str
    id: str


@message("admission")
class Admission(Message, frozen=True, kw_only=True):
    """What an engine of the train lane has to serve; a value in HR_STATE under `admission_key(run)`."""

    run: str
    min_version: int
    issued: int
    """Groups issued so far, dropped ones counted."""
    retired: int
    """Groups retired: their batch's step is done or has failed, or they were dropped."""


def admission_key(run: str) -> str:
    """Key of a run's Admission in HR_STATE."""
    return f"admission.{run}"
