"""The ledger of a run: issued slots, the ends of groups, the staleness bound."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.messages.base import Count, Finite, Message, Name, Seed, Version, message
from headrace.messages.rollout import Lane
from headrace.messages.tasks import TaskRef

LARGEST_BOUND = 64
"""In versions. The credit of a run is (bound + 1) x P groups, so without a limit a run could issue any number of
groups."""


@message("slot_issued")
class SlotIssued(Message, frozen=True, kw_only=True):
    """An attempt of a slot, stored before its request. With `attempt` above 0 it issues the same slot again."""

    run: str
    lane: Lane
    group: Name
    index: Count
    """Number of the group in its run without dropped ones; it decides `min_version`."""
    slot: Count
    attempt: Count
    group_size: Count
    task: TaskRef
    seed: Seed
    min_version: Count


class ClosedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A surviving slot, with the stream sequences of its Trajectory and Score."""

    slot: Count
    attempt: Count
    trajectory_seq: Count
    score_seq: Count
    reward: Finite
    oldest_version: Version


@message("group_closed")
class GroupClosed(Message, frozen=True, kw_only=True):
    """A complete group. Its place in the order of HR_SCORE decides the batch that it is trained in."""

    run: str
    group: Name
    task: TaskRef
    group_size: Count
    slots: tuple[ClosedSlot, ...]
    dropped_slots: dict[str, str] = {}
    """Slot number, as text, to the reason why the slot is not among `slots`."""
    oldest_version: Version


@message("group_dropped")
class GroupDropped(Message, frozen=True, kw_only=True):
    """A group that is never trained on. All of its slots count as dropped for `reason`."""

    run: str
    group: Name
    reason: Literal["stale", "infra", "cancelled", "quarantined", "flat"]
    detail: str = ""
    group_size: Count


@message("staleness_bound")
class StalenessBound(Message, frozen=True, kw_only=True):
    """The staleness bound from a batch on. It is stored in the order of the closings, so that every reader applies the
    same bound to the same batch. A larger bound grows by one version per batch (`algorithms.staleness.Bounds`)."""

    run: str
    bound: Annotated[int, Meta(ge=0, le=LARGEST_BOUND)]
    first_batch: Annotated[int, Meta(ge=0, le=2**31)]
    """The first batch that it holds for: one without a closing when the record was written."""
    asked_seq: Count = 0
    """Sequence in HR_EVENT of the BoundAsked that it answers; 0 for the configured bound."""


@message("bound_asked")
class BoundAsked(Message, frozen=True, kw_only=True):
    """An operator's request for another staleness bound; the curriculum answers with a StalenessBound."""

    run: str
    bound: Count


@message("fence")
class Fence(Message, frozen=True, kw_only=True):
    """An actor took over writing the ledger of a run. Its writes name this record's sequence, so the broker refuses
    writes of earlier holders."""

    run: str
    actor: str
    id: str


@message("admission")
class Admission(Message, frozen=True, kw_only=True):
    """The version that engines of the train lane must serve; a value in HR_ADMISSION under `admission_key(run)`."""

    run: str
    min_version: Count
    issued: Count
    """Groups issued so far, with dropped ones."""
    retired: Count
    """Groups whose batch's step is done or has failed, and dropped groups."""


def admission_key(run: str) -> str:
    """Key of a run's Admission in HR_ADMISSION."""
    return f"admission.{run}"
