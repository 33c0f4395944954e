"""From the broker's advisory to a letter that a person can read and send again.

A message that was given up is told of by an advisory. In a limits stream the message is still there. A work queue
forgets a terminated one (its consumer published a copy, `Rejected`, before that) and keeps one that ran out of
deliveries for ever, so whoever has written the letter removes it.

A letter has a key, ``<stream>/<consumer>/<sequence>``, that is known before it is written. What a person decides about
it is a record beside it (`LetterSettled`): letters stay, since the books of a run are made of them.
"""

import re
from typing import Any, Literal, NamedTuple

from headrace.bus import reading, tracing
from headrace.bus.connection import MAX_INLINE, Bus
from headrace.bus.errors import BusError, MessageGone
from headrace.bus.received import Received
from headrace.messages import subjects as s
from headrace.messages.codec import UnknownType, decode
from headrace.messages.operations import Advisory, DeadLetter, LetterSettled, Rejected

RETRIED = ("HR_TASK", "HR_TRAJ", "HR_FEEDBACK")
"""Streams whose messages may be sent again: work, which its consumers do once however often they read it. The others
hold records of the books, where a second one would be a lie."""
_OWN = ("Nats-", "traceparent", "tracestate")
"""Headers that the broker or the bus writes anew."""


class Filed(NamedTuple):
    """A letter as it lies on HR_DLQ."""

    seq: int
    time: float
    letter: DeadLetter
    settled: LetterSettled | None


async def letter_of(bus: Bus, received: Received[Any]) -> DeadLetter | None:
    """The letter for an Advisory (from HR_ADVISORY) or a Rejected (from HR_EVENT).

    None for the advisory of a terminated work-queue message, whose letter is made of its Rejected instead.
    """
    message = received.message
    if isinstance(message, Rejected):
        return _letter(message.stream, message.consumer, message, message.headers, message.payload)
    assert isinstance(message, Advisory)
    stream = s.STREAM.get(message.stream)
    queue = stream is not None and stream.retention == "workqueue"
    if queue and message.kind == "terminated":
        return None
    try:
        stored = await reading.from_leader(bus.link, message.stream, {"seq": message.stream_seq})
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


async def publish(bus: Bus, letter: DeadLetter) -> int:
    """Put a letter on HR_DLQ, once per message, and free a work queue of it; the letter's sequence."""
    where = s.DLQ.at(stream=s.token(letter.stream), consumer=s.token(letter.consumer))
    seq = await bus.publish(where, letter, msg_id=f"dead-{letter.stream}-{letter.consumer}-{letter.stream_seq}")
    stream = s.STREAM.get(letter.stream)
    if stream is not None and stream.retention == "workqueue":
        await bus.delete(letter.stream, letter.stream_seq)
    return seq


def key_of(letter: DeadLetter) -> str:
    """The name of a letter that is known before it has a sequence of its own."""
    return f"{letter.stream}/{letter.consumer}/{letter.stream_seq}"


def run_of(letter: DeadLetter) -> str:
    """The run whose message it was, by its subject; empty where that names none."""
    tokens = letter.subject.split(".")
    return tokens[2] if len(tokens) > 3 and tokens[:2] != ["hr", "feedback"] else ""


async def filed(bus: Bus) -> list[Filed]:
    """Every letter of this broker that is still kept, oldest first, with what was decided about it."""
    letters: dict[int, tuple[float, DeadLetter]] = {}
    settled: dict[int, LetterSettled] = {}
    async for received in bus.history("HR_DLQ", s.DLQ.where()):
        try:
            record = received.message
        except (UnknownType, MessageGone):
            continue
        if isinstance(record, DeadLetter):
            letters[received.seq] = received.time, record
        elif isinstance(record, LetterSettled):
            settled.setdefault(record.letter, record)
    return [Filed(seq, time, letter, settled.get(seq)) for seq, (time, letter) in letters.items()]


async def resend(bus: Bus, entry: Filed) -> int:
    """Store the message once more where it was, under an id of its own; its sequence. BusError says why not."""
    letter = entry.letter
    if letter.stream not in RETRIED:
        raise BusError(
            f"letter {entry.seq} is a record of {letter.stream}, and a second one would falsify the books: "
            f"only {', '.join(RETRIED)} hold work that can be tried again"
        )
    if not letter.subject or not letter.payload:
        raise BusError(f"letter {entry.seq} has no message: {letter.reason}")
    headers = {name: value for name, value in letter.headers.items() if not name.startswith(_OWN)}
    first = re.sub(r"\.r\d+$", "", letter.headers.get("Nats-Msg-Id", key_of(letter)))
    msg_id = f"{first}.r{entry.seq}"
    if len(letter.payload) <= MAX_INLINE:
        return await bus.publish_raw(letter.subject, letter.payload, headers, msg_id=msg_id)
    try:
        return await bus.publish(letter.subject, decode(letter.payload, letter.headers), msg_id=msg_id)
    except UnknownType as error:
        raise BusError(f"letter {entry.seq} is over 1 MiB and cannot be read: {error}") from None


async def settle(bus: Bus, entry: Filed, how: Literal["retried", "dropped"], sent: int = 0, note: str = "") -> None:
    """Write down what became of a letter."""
    letter = entry.letter
    record = LetterSettled(
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
