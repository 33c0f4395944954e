"""Operation of a run: events, heartbeats, metrics, dead letters, claim checks."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace.messages.base import Amount, Count, Finite, Message, Share, message

MID_TRAINING, LEARNING, LAST_PHASE = "mid-training", "reinforcement learning", "final evaluation"
"""The text of the event `phase` with which a phase of a run begins."""


@message("event")
class Event(Message, frozen=True, kw_only=True):
    """An event that has no struct of its own, mostly a failure with its reason."""

    actor: str
    id: str
    run: str = ""
    kind: str
    level: Literal["info", "warning", "error"] = "info"
    text: str = ""
    data: dict[str, float | int | str | bool] = {}


@message("beat")
class Heartbeat(Message, frozen=True, kw_only=True):
    """The state of an actor, published every two seconds and kept in HR_PRESENCE."""

    actor: str
    id: str
    node: str
    pid: Count
    state: Literal["starting", "running", "draining", "stopped"]
    run: str = ""
    status: str = ""
    busy: Finite = 0.0
    """Share of the last interval, 0 to 1, in which the actor did not wait for input or credit."""
    waits: str = ""
    """The reasons for which the actor's work stands still; empty while it works, and without work."""
    cpu: Share | None = None
    """Share of the node's processors in use since the heartbeat before, by all processes; None where it is unknown."""
    gpu: Share | None = None
    """Mean of the node's GPUs, likewise; None without a GPU."""


@message("metric")
class Metric(Message, frozen=True, kw_only=True):
    """Named figures of one actor at one moment, on core NATS."""

    actor: str
    id: str
    run: str
    time: Amount
    values: dict[str, float]


@message("dead_letter")
class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that a consumer gave up, with all data that is needed to inspect it and to send it again."""

    stream: str
    consumer: str
    stream_seq: Count
    subject: str
    type: str
    reason: str
    deliveries: Count
    headers: dict[str, str]
    payload: bytes
    trace: str = ""
    command: str = ""
    """The command that sends the message to its consumer again."""


@message("letter_settled")
class DeadLetterSettled(Message, frozen=True, kw_only=True):
    """An operator's decision about a dead letter. The dead letter itself is kept, because the ledger counts it."""

    stream: str
    consumer: str
    stream_seq: Count
    letter: Count
    """Sequence of the dead letter on HR_DLQ."""
    how: Literal["retried", "dropped"]
    sent: Count = 0
    """Sequence under which the message was stored again; 0 when it was dropped."""
    note: str = ""


@message("rejected")
class Rejected(Message, frozen=True, kw_only=True):
    """A copy of a work-queue message that a consumer gave up. The broker removes such a message at once, so the
    consumer stores the copy first; the dead letter is made of it."""

    stream: str
    consumer: str
    stream_seq: Count
    subject: str
    reason: str
    deliveries: Count
    headers: dict[str, str]
    payload: bytes


@message("advisory")
class Advisory(Message, frozen=True, kw_only=True):
    """The broker's notice that a message was given up. On the wire it is nats-server's own JSON."""

    kind: Literal["max_deliver", "terminated"]
    stream: str
    consumer: str
    stream_seq: Count
    deliveries: Count
    reason: str = ""


@message("blob_ref")
class BlobRef(Message, frozen=True, kw_only=True):
    """A claim check: the payload is in HR_BLOB under its sha256, in `chunks` pieces of 1 MiB."""

    sha256: Annotated[str, Meta(pattern=r"^([a-z0-9_-]{1,128}\.)?[0-9a-f]{32,64}\Z")]
    """Name of the blob: the content's sha256, with ``for<seconds>-<number>.`` before it where it expires;
    with `keyed` a user's hash, a dot and an HMAC of the content; for a file that never leaves its node (`chunks` 0) the
    value of `check`."""
    bytes: Annotated[int, Meta(ge=0, le=4 << 30)]
    chunks: Annotated[int, Meta(ge=0, le=4096)]
    type: str
    encoding: str = ""
    keyed: bool = False
    expiry: str = ""
    """Of a keyed one that expires: the rest of the HMAC's key, as in the names of those without a key."""
    node: str = ""
    """The node that holds a file of the content; HR_BLOB may get the content some seconds later."""
    check: str = ""
    """xxh3-128 of that file's content: it detects damage like sha256 at a fiftieth of the time."""


@message("ping")
class Ping(Message, frozen=True, kw_only=True):
    """A request for an actor's state, answered with a Heartbeat."""

    note: str = ""


@message("ack")
class Ack(Message, frozen=True, kw_only=True):
    """The answer of a request without a result: done, or the reason why not."""

    ok: bool = True
    detail: str = ""
    code: str = ""
    """Of the error that is the reason; empty: none, or not one of headrace's."""
