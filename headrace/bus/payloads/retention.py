"""Deletes old records of a stream together with the payloads in HR_BLOB that they refer to.

The records go first: after a crash between the two purges a payload is left over (HR_BLOB's own limits remove it), and
never a record whose payload is missing.
"""

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.nats.ordered_reader import OrderedReader
from headrace.bus.payloads import claim_checks
from headrace.messages.codec import TYPE_HEADER, UnreadableMessage, decode
from headrace.messages.operations import BlobRef


async def purge(bus: Bus, stream: str, subject: str, before: int) -> int:
    """Purge the records on `subject` below sequence `before`, and their payloads. Returns the number of records.

    Denied when the role may not purge the stream. An unreadable claim check is purged like any record.
    """
    payloads: set[str] = set()
    if before > 1:
        async for message, _ in OrderedReader(bus.connection, stream, [subject], until=before - 1).messages():
            if (message.headers or {}).get(TYPE_HEADER, "").partition("/")[0] != BlobRef.type_name:
                continue
            try:
                ref = decode(message.data, message.headers)
            except UnreadableMessage:
                continue
            assert isinstance(ref, BlobRef)
            payloads |= claim_checks.subjects(ref)
    purged = await bus.purge(stream, subject=subject, before=before)
    if payloads and await _is_mirror(bus, stream):
        return purged  # the payloads are those of the origin's records
    for payload in sorted(payloads):
        await bus.purge(claim_checks.STREAM, subject=payload)
    return purged


async def purge_all(bus: Bus, stream: str, subject: str) -> int:
    """As `purge`, for all records on `subject`, a filter."""
    return await purge(bus, stream, subject, await bus.last_seq(stream) + 1)


async def _is_mirror(bus: Bus, stream: str) -> bool:
    """Whether the stream is a region's copy of the hub's."""
    return "mirror" in msgspec.json.decode(await bus.connection.api(f"STREAM.INFO.{stream}"))["config"]
