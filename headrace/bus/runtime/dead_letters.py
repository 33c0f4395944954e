"""The dead-letter queue: from the broker's advisory to a DeadLetter that a person can read and retry.

The broker publishes an advisory about every message that it gives up. A limits stream still holds the message. A work
queue removes a terminated message (its consumer published a copy, `Rejected`, before that) and keeps a message that ran
out of deliveries for ever, so the dead-letter actor deletes it once the DeadLetter is stored.

A dead letter has a key, ``<stream>/<consumer>/<sequence>``, known before it is written. A person's decision about
it is a separate record (`DeadLetterSettled`). Dead letters are kept, because the ledger counts them.
"""

import re
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, MessageGone, Reject
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.ordered_reader import Stored
from headrace.bus.nats.received import Received
from headrace.bus.runtime import tracing
from headrace.bus.signatures import FORGED, HEADER, ID_HEADER
from headrace.bus.storing import MAX_INLINE
from headrace.messages import subjects as s
from headrace.messages.codec import UnreadableMessage, decode
from headrace.messages.operations import Advisory, DeadLetter, DeadLetterSettled, Rejected

RETRIED = ("HR_TASK", "HR_TRAJ", "HR_FEEDBACK")
"""Streams whose messages may be sent again: work that consumers do once, however often they receive it. The others hold
ledger records, of which a second copy would be wrong."""
_OWN = ("Nats-", "traceparent", "tracestate", HEADER, ID_HEADER)
"""Headers that the broker or the bus writes anew."""


SHOWN_BYTES = 2000
"""A report shows a binary field of a payload as text up to this size."""
JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None


class DeadLetterEntry(NamedTuple):
    """A dead letter with its place in HR_DLQ and the decision about it, None while there is none."""

    seq: int
    time: float
    letter: DeadLetter
    settled: DeadLetterSettled | None


class DeadLetterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `headrace dlq --show`: a dead letter, the decision about it, and its message."""

    letter: int
    """Sequence of the dead letter on HR_DLQ."""
    key: str
    time: float
    """Unix time at which the broker stored the dead letter, in seconds."""
    stream: str
    consumer: str
    stream_seq: int
    subject: str
    type: str
    reason: str
    deliveries: int
    headers: dict[str, str]
    trace: str
    command: str
    settled: DeadLetterSettled | None
    payload_bytes: int
    message: JsonValue
    """The decoded message; a sentence where it cannot be read. Long or binary fields are replaced by their size."""


def report_of(entry: DeadLetterEntry) -> DeadLetterReport:
    """The report on one dead letter."""
    letter = entry.letter
    try:
        message = _plain(msgspec.to_builtins(decode(letter.payload, letter.headers), builtin_types=(bytes,)))
    except UnreadableMessage as error:
        message = f"unreadable: {error}"
    return DeadLetterReport(
        letter=entry.seq,
        key=key_of(letter),
        time=entry.time,
        stream=letter.stream,
        consumer=letter.consumer,
        stream_seq=letter.stream_seq,
        subject=letter.subject,
        type=letter.type,
        reason=letter.reason,
        deliveries=letter.deliveries,
        headers=letter.headers,
        trace=letter.trace,
        command=letter.command,
        settled=entry.settled,
        payload_bytes=len(letter.payload),
        message=message,
    )


def _plain(value: Any) -> JsonValue:
    """Builtins that JSON accepts: short printable bytes become text, other bytes their count."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        return text if len(value) <= SHOWN_BYTES and text.isprintable() | ("\n" in text) else f"<{len(value)} bytes>"
    return value  # type: ignore[no-any-return]


async def dead_letter_from(bus: Bus, received: Received[Any]) -> DeadLetter | None:
    """The letter for an Advisory (from HR_ADVISORY) or a Rejected (from HR_EVENT).

    None for the advisory of a terminated work-queue message, whose letter is made of its Rejected instead.
    """
    message = received.message
    if isinstance(message, Rejected):
        return _letter(message.stream, message.consumer, message, message.headers, message.payload)
    if not isinstance(message, Advisory):
        raise Reject(f"expected an advisory or a rejected copy, got {type(message).__name__}")
    stream = s.STREAM.get(message.stream)
    queue = stream is not None and stream.retention == "workqueue"
    if queue and message.kind == "terminated":
        return None
    try:
        stored = await ordered_reader.from_leader(bus.connection, message.stream, {"seq": message.stream_seq})
    except MessageGone:
        return _letter(message.stream, message.consumer, message, {}, b"", gone=True)
    return _letter(message.stream, message.consumer, message, stored.headers, stored.data, subject=stored.subject)


def _letter(
    stream: str,
    consumer: str,
    source: Advisory | Rejected,
    headers: dict[str, str],
    payload: bytes,
    *,
    subject: str = "",
    gone: bool = False,
) -> DeadLetter:
    context = tracing.extract(headers)
    reason = source.reason or f"not settled in {source.deliveries} deliveries"
    return DeadLetter(
        stream=stream,
        consumer=consumer,
        stream_seq=source.stream_seq,
        subject=subject or getattr(source, "subject", ""),
        type=headers.get("Hr-Type", "").partition("/")[0],
        reason=f"{reason} (the message itself is gone)" if gone else reason,
        deliveries=source.deliveries,
        headers=headers,
        payload=payload,
        trace=context.trace_id if context else "",
    )


async def queued(bus: Bus, run: str) -> AsyncIterator[Stored]:
    """The requests of a run that are in HR_TASK, oldest first, also those that a consumer has taken."""
    seq = 1
    while True:
        request = {"seq": seq, "next_by_subj": s.TASK.where(run=run)}
        try:
            stored = await ordered_reader.from_leader(bus.connection, "HR_TASK", request)
        except MessageGone:
            return
        if bus.readable(bus.stored("HR_TASK", stored)):
            yield stored
        seq = stored.seq + 1


def unpulled(run: str, stored: Stored, wait_s: float) -> DeadLetter:
    """The letter for a request of HR_TASK while no rollout actor is alive."""
    consumer = f"rollout-{run}-{stored.subject.split('.')[3]}"
    reason = (
        f"no rollout actor of run {run} was alive for {wait_s:g} s ([rollout] wait_s): start one with "
        f"`headrace actor rollout --config TOML --run {run}`"
    )
    given_up = Advisory(
        kind="max_deliver", stream="HR_TASK", consumer=consumer, stream_seq=stored.seq, deliveries=0, reason=reason
    )
    return _letter("HR_TASK", consumer, given_up, stored.headers, stored.data, subject=stored.subject)


async def publish(bus: Bus, letter: DeadLetter) -> int:
    """Store a letter on HR_DLQ, once per message, and remove the message from a work queue; the letter's sequence."""
    where = s.DLQ.at(stream=s.token(letter.stream), consumer=s.token(letter.consumer))
    seq = await bus.publish(where, letter, msg_id=f"dead-{letter.stream}-{letter.consumer}-{letter.stream_seq}")
    stream = s.STREAM.get(letter.stream)
    if stream is not None and stream.retention == "workqueue":
        await bus.delete(letter.stream, letter.stream_seq)
    return seq


def key_of(letter: DeadLetter) -> str:
    """The key of a letter, which is known before the letter has a sequence."""
    return f"{letter.stream}/{letter.consumer}/{letter.stream_seq}"


def name_of(letter: DeadLetter) -> str:
    """The name that the writer of the message gave it; empty for none. Earlier versions used it as the message id."""
    return letter.headers.get(ID_HEADER) or letter.headers.get("Nats-Msg-Id", "")


def forged(letter: DeadLetter) -> bool:
    """Whether the letter is about a record that its writer did not sign: nothing follows from it."""
    return letter.reason.startswith(FORGED)


def run_of(letter: DeadLetter) -> str:
    """The run of the message, from its subject; empty where that names none."""
    tokens = letter.subject.split(".")
    return tokens[2] if len(tokens) > 3 and tokens[:2] != ["hr", "feedback"] else ""


async def entries(bus: Bus) -> list[DeadLetterEntry]:
    """Every dead letter that the broker still keeps, oldest first, each with the decision about it."""
    letters: dict[int, tuple[float, DeadLetter]] = {}
    settled: dict[int, DeadLetterSettled] = {}
    async for received in bus.history("HR_DLQ", s.DLQ.where()):
        record = received.message
        if isinstance(record, DeadLetter):
            letters[received.seq] = received.time, record
        elif isinstance(record, DeadLetterSettled):
            settled.setdefault(record.letter, record)
    return [DeadLetterEntry(seq, time, letter, settled.get(seq)) for seq, (time, letter) in letters.items()]


async def resend(bus: Bus, entry: DeadLetterEntry) -> int:
    """Store the message again on its subject, under a new id; its sequence. BusError says why not."""
    letter = entry.letter
    if letter.stream not in RETRIED:
        raise BusError(
            f"letter {entry.seq} is a record of {letter.stream}, and a second one would falsify the ledger: "
            f"only {', '.join(RETRIED)} hold work that can be tried again"
        )
    if forged(letter):
        raise BusError(f"letter {entry.seq} is no message of the run: {letter.reason}")
    if not letter.subject or not letter.payload:
        raise BusError(f"letter {entry.seq} has no message: {letter.reason}")
    headers = {name: value for name, value in letter.headers.items() if not name.startswith(_OWN)}
    first = re.sub(r"\.r\d+$", "", name_of(letter) or key_of(letter))
    msg_id = f"{first}.r{entry.seq}"
    if len(letter.payload) <= MAX_INLINE:
        return await bus.publish_raw(letter.subject, letter.payload, headers, msg_id=msg_id)
    try:
        return await bus.publish(letter.subject, decode(letter.payload, letter.headers), msg_id=msg_id)
    except UnreadableMessage as error:
        raise BusError(f"letter {entry.seq} is over 1 MiB and cannot be read: {error}") from None


async def record_decision(
    bus: Bus, entry: DeadLetterEntry, how: Literal["retried", "dropped"], sent: int = 0, note: str = ""
) -> None:
    """Record that a dead letter was retried or dropped."""
    letter = entry.letter
    record = DeadLetterSettled(
        stream=letter.stream,
        consumer=letter.consumer,
        stream_seq=letter.stream_seq,
        letter=entry.seq,
        how=how,
        sent=sent,
        note=note,
    )
    where = s.DLQ.at(stream=s.token(letter.stream), consumer=s.token(letter.consumer))
    await bus.publish(where, record, msg_id=f"settled-{entry.seq}")
