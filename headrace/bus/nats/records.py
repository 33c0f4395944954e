"""Reads streams: history, live records, single records. A record that cannot be read never stops a reader.

The idea: any role with access to a stream can write any bytes into it, and a newer version may write types that this
one does not know. A reader that raised at such a record would fail again after every restart, because the record is
history. So `history`, `follow`, `last` and the key-value buckets hand out readable records alone. Each unreadable one
is counted in `skipped` and reported once through `on_skipped` (an actor makes an event of it). Durable consumers
differ: for them the record is work, and it becomes a dead letter (`headrace/bus/runtime/delivery.py`).

Trade-off: every record is decoded when it is read, also by a caller that needs only its time; `records` hands out all
of them undecoded.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus.errors import CorruptPayload, MessageGone
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.connection import NatsConnection
from headrace.bus.nats.received import DeliveryInfo, Received
from headrace.bus.payloads.shared_memory import SharedMemoryStore, fetch
from headrace.bus.signatures import Forged, Trust
from headrace.messages.codec import ENCODING_HEADER, TYPE_HEADER, UnreadableMessage, decode
from headrace.messages.operations import BlobRef

UNREADABLE = (UnreadableMessage, MessageGone, CorruptPayload)
"""The errors of `Received.message`: not a message of headrace, one that its writer did not sign, or a claim check whose
payload is missing or damaged."""
REMEMBERED = 10_000
"""Skipped records that are remembered; beyond them a record that is read again is reported again."""


class Skipped(msgspec.Struct, frozen=True):
    """A record that a reader passed over."""

    stream: str
    seq: int
    subject: str
    reason: str
    forged: bool
    """Whether no writer of that subject has signed it."""


class Records:
    """The reading side of a connection."""

    def __init__(self, connection: NatsConnection, trust: Trust) -> None:
        self.connection, self.trust = connection, trust
        self.shared_memory: SharedMemoryStore | None = None
        """Files of this node that hold payloads which need not go through the broker."""
        self.skipped: dict[tuple[str, int], Skipped] = {}
        """By stream and sequence, the newest `REMEMBERED` records that this connection passed over."""
        self.skipped_count = 0
        self.on_skipped: Callable[[Skipped], None] | None = None
        """Called once for each record that is passed over."""

    async def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Received[Any]]:
        """Readable records from sequence `start`, in order, up to the stream's last one at the time of the call."""
        async for received in self.records(stream, *filters, start=start):
            if self.readable(await self.claim(received)):
                yield received

    async def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Received[Any]]:
        """History, then live records, for ever and in order; survives reconnects. Nothing is acknowledged."""
        reader = ordered_reader.OrderedReader(self.connection, stream, filters, start=start)
        async for message, info in reader.messages():
            received = await self.claim(self._received(message, info))
            if self.readable(received):
                yield received

    async def records(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Received[Any]]:
        """All stored records like `history`, unread: no payload is fetched, nothing is verified or passed over."""
        until = await ordered_reader.last_seq(self.connection, stream)
        if until < start:
            return
        reader = ordered_reader.OrderedReader(self.connection, stream, filters, start=start, until=until)
        async for message, info in reader.messages():
            yield self._received(message, info)

    async def get(self, stream: str, seq: int) -> Received[Any]:
        """One record by sequence. MessageGone when it was purged; `Received.message` raises one of `UNREADABLE`."""
        return await self.claim(self.stored(stream, await ordered_reader.by_sequence(self.connection, stream, seq)))

    async def last(self, stream: str, subject: str) -> Received[Any] | None:
        """The last readable record on a subject or filter; None when there is none.

        From the leader: it sees every acknowledged write. Only when the last record is unreadable, the whole history
        of the subject is read for the one before.
        """
        try:
            stored = await ordered_reader.from_leader(self.connection, stream, {"last_by_subj": subject})
        except MessageGone:
            return None
        newest = await self.claim(self.stored(stream, stored))
        if self.readable(newest):
            return newest
        before: Received[Any] | None = None
        async for received in self.history(stream, subject):
            before = received
        return before

    async def tail(self, stream: str, subject: str) -> int:
        """Sequence of the last record on a subject or filter, readable or not, 0 for none: what a write with an
        expected sequence names. From the leader."""
        try:
            return (await ordered_reader.from_leader(self.connection, stream, {"last_by_subj": subject})).seq
        except MessageGone:
            return 0

    async def last_seq(self, stream: str) -> int:
        """Sequence of the stream's last record, 0 when it never had one."""
        return await ordered_reader.last_seq(self.connection, stream)

    async def claim(self, received: Received[Any]) -> Received[Any]:
        """Fetch the payload of a claim check that its writer signed, so that the record holds what was published.

        An error that makes it unreadable goes to `received.error`. BusError while the broker cannot be reached.
        """
        if received.type != BlobRef.type_name:
            return received
        try:
            received.verify()
            ref = decode(received.data, received.headers)
            assert isinstance(ref, BlobRef)
            received.data = await fetch(self.connection, self.shared_memory, ref, received.time)
            received.headers = {**received.headers, **headers_of(ref)}
        except UNREADABLE as error:
            received.error = error
        return received

    def readable(self, received: Received[Any]) -> bool:
        """Whether a record can be read; one that cannot is counted and reported."""
        try:
            _ = received.message
        except UNREADABLE as error:
            self.skip(Skipped(received.stream, received.seq, received.subject, str(error), isinstance(error, Forged)))
            return False
        return True

    def signed(self, received: Received[Any]) -> bool:
        """Whether a record's writer signed it, whatever its content; one without that is counted and reported."""
        try:
            received.verify()
        except UnreadableMessage as error:
            self.skip(Skipped(received.stream, received.seq, received.subject, str(error), isinstance(error, Forged)))
            return False
        return True

    def skip(self, record: Skipped) -> None:
        """Count a record that is passed over, and report it the first time."""
        place = (record.stream, record.seq)
        if place in self.skipped:
            return
        self.skipped[place] = record
        self.skipped_count += 1
        if len(self.skipped) > REMEMBERED:
            del self.skipped[next(iter(self.skipped))]
        if self.on_skipped is not None:
            self.on_skipped(record)

    def _received(self, message: Msg, info: DeliveryInfo) -> Received[Any]:
        return Received(
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            stream=info.stream,
            seq=info.seq,
            time=info.time,
            trust=self.trust,
        )

    def stored(self, stream: str, stored: ordered_reader.Stored) -> Received[Any]:
        """A stored message as a record."""
        return Received(
            subject=stored.subject,
            data=stored.data,
            headers=stored.headers,
            stream=stream,
            seq=stored.seq,
            time=stored.time,
            trust=self.trust,
        )


def headers_of(ref: BlobRef) -> dict[str, str]:
    """Type and encoding headers of the message that a claim check stands for."""
    return {TYPE_HEADER: ref.type, ENCODING_HEADER: ref.encoding} if ref.encoding else {TYPE_HEADER: ref.type}
