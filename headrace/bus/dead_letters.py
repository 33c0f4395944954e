"""From the broker's advisory to a letter that a person can read and send again.

A message that was given up is told of by an advisory. In a limits stream the message is still there. A work queue
forgets a terminated one (its consumer published a copy, `Rejected`, before that) and keeps one that ran out of
deliveries for ever, so whoever has written the letter removes it.
"""

from typing import Any

from headrace.bus import reading, tracing
from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.received import Received
from headrace.messages import subjects as s
from headrace.messages.operations import Advisory, DeadLetter, Rejected


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
