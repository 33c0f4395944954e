"""What operators read: events, beats, metrics, dead letters."""

from typing import Literal

from headrace.messages.base import Message, message


@message("event")
class Event(Message, frozen=True, kw_only=True):
    """Anything worth a line that has no struct of its own: failures with reason first of all."""

    actor: str
    id: str
    run: str = ""
    kind: str
    level: Literal["info", "warning", "error"] = "info"
    text: str = ""
    data: dict[str, float | int | str | bool] = {}


@message("beat")
class Beat(Message, frozen=True, kw_only=True):
    """A sign of life every few seconds, also kept in HR_PRESENCE."""

    actor: str
    id: str
    node: str
    pid: int
    state: Literal["starting", "running", "draining", "stopped"]
    run: str = ""
    status: str = ""
    busy: float = 0.0
    """Share of the last interval in which the actor was not waiting for input or credit."""


@message("metric")
class Metric(Message, frozen=True, kw_only=True):
    """Figures of one actor at one moment, on core NATS."""

    actor: str
    id: str
    run: str
    time: float
    values: dict[str, float]


@message("dead_letter")
class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that could not be handled, with everything needed to look at it and to try again."""

    stream: str
    consumer: str
    stream_seq: int
    subject: str
    type: str
    reason: str
    deliveries: int
    headers: dict[str, str]
    payload: bytes
    trace: str = ""
    command: str = ""
    """Sends it again to whoever could not handle it."""


@message("letter_settled")
class LetterSettled(Message, frozen=True, kw_only=True):
    """What a person decided about a dead letter. The letter itself stays: books are made of it."""

    stream: str
    consumer: str
    stream_seq: int
    letter: int
    """Sequence of the letter on HR_DLQ."""
    how: Literal["retried", "dropped"]
    sent: int = 0
    """Sequence under which the message was stored again; 0 for one that was dropped."""
    note: str = ""


@message("rejected")
class Rejected(Message, frozen=True, kw_only=True):
    """A copy of a work-queue message that its handler gave up: the broker forgets such a message at once, so the copy
    is published first, and the dead letter is made of it."""

    stream: str
    consumer: str
    stream_seq: int
    subject: str
    reason: str
    deliveries: int
    headers: dict[str, str]
    payload: bytes


@message("advisory")
class Advisory(Message, frozen=True, kw_only=True):
    """The broker's word (its own JSON, read by the bus) about a message that was given up."""

    kind: Literal["max_deliver", "terminated"]
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int
    reason: str = ""


@message("blob_ref")
class BlobRef(Message, frozen=True, kw_only=True):
    """A claim check: the real message lies in HR_BLOB under its sha256, in `chunks` pieces of 1 MiB."""

    sha256: str
    """Name of the blob; with `keyed` it is a user's hash and an HMAC of the content. Of one that never leaves its
    node (`chunks` 0) it is `check`."""
    bytes: int
    chunks: int
    type: str
    encoding: str = ""
    keyed: bool = False
    node: str = ""
    """Where a file of this content was laid down, which HR_BLOB may get a little later."""
    check: str = ""
    """xxh3-128 of that file's content: as good as sha256 against damage, and fifty times as fast."""


@message("ping")
class Ping(Message, frozen=True, kw_only=True):
    """Ask an actor for its state; answered with a Beat."""

    note: str = ""


@message("ack")
class Ack(Message, frozen=True, kw_only=True):
    """The plain answer of a request that has no other: done, or why not."""

    ok: bool = True
    detail: str = ""
