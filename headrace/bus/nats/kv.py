"""Key-value buckets with typed values: the layout of every NATS client, one stream ``KV_<bucket>`` each.

Values are read from the leader, so a read sees every write that was acknowledged before it. The revision of an entry is
its stream sequence: `update` with an old one is refused, which makes it a fencing token. An entry, or a deletion, that
no writer of its key signed changes nothing: the one before it counts.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from nats.aio.msg import Msg

from headrace.bus.errors import MessageGone, WrongSequence
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.connection import NatsConnection
from headrace.bus.nats.received import DeliveryInfo
from headrace.bus.nats.records import Skipped
from headrace.bus.signatures import Forged, Trust, kind_of
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode, encode

_GONE = ("DEL", "PURGE")


def _deleted(headers: dict[str, str]) -> bool:
    return headers.get("KV-Operation") in _GONE or "Nats-Marker-Reason" in headers


class Publisher(Protocol):
    """The parts of the bus that a bucket uses: its connection, and a publish that is repeated until it is stored."""

    def skip(self, record: Skipped) -> None:
        """Count and report an entry that cannot be read."""

    @property
    def connection(self) -> NatsConnection:
        """The connection."""

    @property
    def trust(self) -> Trust:
        """The keys of the buckets' writers."""

    async def publish_raw(
        self, subject: str, payload: bytes, headers: dict[str, str], *, expect: int | None = None
    ) -> int:
        """Store encoded bytes; the stream sequence. WrongSequence when `expect` is not the last one on the subject."""


class KeyValue:
    """One bucket. Keys are dotted tokens, as in subjects."""

    def __init__(self, bus: Publisher, bucket: str) -> None:
        self._bus, self.bucket = bus, bucket
        self._stream, self._prefix = f"KV_{bucket}", f"$KV.{bucket}."

    async def put(self, key: str, message: Message) -> int:
        """Write, whatever the previous value; the new revision."""
        return await self._write(key, message, None)

    async def create(self, key: str, message: Message) -> int:
        """Write if there is no such key (or it was deleted, or has lapsed). WrongSequence when there is one."""
        try:
            return await self._write(key, message, 0)
        except WrongSequence:
            last = await self._last(key)
            if last is None:
                return await self._write(key, message, 0)
            if not _deleted(last.headers):
                raise WrongSequence(f"{self.bucket} has {key} already, at revision {last.seq}", last.seq) from None
            return await self._write(key, message, last.seq)

    async def update(self, key: str, message: Message, revision: int) -> int:
        """Write if the entry still has that revision. WrongSequence when another wrote meanwhile."""
        return await self._write(key, message, revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove a key; with `revision`, only if the entry still has it."""
        await self._bus.publish_raw(self._prefix + key, b"", {"KV-Operation": "DEL"}, expect=revision)

    async def get(self, key: str) -> tuple[Message, int] | None:
        """Value and revision, from the leader; None when there is no readable value. An entry that no writer of the key
        signed is passed over, and a write with the revision that is returned takes its place."""
        last = await self._last(key)
        if last is None or _deleted(last.headers):
            return None
        message = self._read(last)
        return None if message is None else (message, last.seq)

    async def keys(self, pattern: str = ">") -> list[str]:
        """Keys that match and have a readable value, sorted."""
        return sorted([key async for key, message, _ in self._entries(pattern, live=False) if message is not None])

    async def items(self, pattern: str = ">") -> dict[str, tuple[Message, int]]:
        """All readable entries that match: key to (value, revision)."""
        values: dict[str, tuple[Message, int]] = {}
        async for key, message, revision in self._entries(pattern, live=False):
            if message is not None:
                values[key] = (message, revision)
        return values

    async def newest(self, pattern: str) -> int:
        """The revision of the newest write to a key that matches; 0 without one. A watcher that has seen it has seen
        every write that was acknowledged before this call."""
        request = {"last_by_subj": self._prefix + pattern}
        try:
            return (await ordered_reader.from_leader(self._bus.connection, self._stream, request)).seq
        except MessageGone:
            return 0

    def watch(self, pattern: str = ">") -> AsyncIterator[tuple[str, Message | None, int]]:
        """Each entry's last state, then every change as it happens; None for a key that was deleted or has lapsed."""
        return self._entries(pattern, live=True)

    async def changes(self, pattern: str, after: int) -> AsyncIterator[ordered_reader.Stored]:
        """Every change after a revision as it happens, neither verified nor decoded: `value` does both."""
        filters = [self._prefix + pattern]
        reader = ordered_reader.OrderedReader(self._bus.connection, self._stream, filters, start=after + 1)
        async for message, delivery in reader.messages():
            yield _stored(message, delivery)

    def key(self, change: ordered_reader.Stored) -> str:
        """The key of a change."""
        return change.subject.removeprefix(self._prefix)

    async def value(self, change: ordered_reader.Stored) -> tuple[Message | None, int] | None:
        """Value and revision after a change; the value of a key that was deleted or has lapsed is None. None for a
        change that counts nothing: it cannot be read, or no writer of the key signed it and none signed one before."""
        stored: ordered_reader.Stored | None = change
        if not self._signed(change):
            stored = await self._last(self.key(change))
        if stored is None or _deleted(stored.headers):
            return None if stored is None else (None, stored.seq)
        value = self._read(stored)
        return None if value is None else (value, stored.seq)

    async def _entries(self, pattern: str, *, live: bool) -> AsyncIterator[tuple[str, Message | None, int]]:
        until = None if live else await ordered_reader.last_seq(self._bus.connection, self._stream)
        if until == 0:
            return
        reader = ordered_reader.OrderedReader(
            self._bus.connection, self._stream, [self._prefix + pattern], until=until, last_per_subject=True
        )
        async for message, delivery in reader.messages():
            stored = _stored(message, delivery)
            if (value := await self.value(stored)) is not None:
                yield self.key(stored), *value

    def _read(self, entry: ordered_reader.Stored) -> Message | None:
        """The value of an entry; None, counted and reported, when it cannot be read."""
        try:
            return decode(entry.data, entry.headers)
        except UnreadableMessage as error:
            self._bus.skip(Skipped(self._stream, entry.seq, entry.subject, str(error), isinstance(error, Forged)))
            return None

    def _signed(self, entry: ordered_reader.Stored) -> bool:
        """Whether a writer of this key signed an entry or deletion; another one is counted and reported."""
        try:
            kind = kind_of(entry.headers, entry.data)
            self._bus.trust.check(entry.subject, kind, entry.headers, entry.data, entry.time)
        except UnreadableMessage as error:
            self._bus.skip(Skipped(self._stream, entry.seq, entry.subject, str(error), isinstance(error, Forged)))
            return False
        return True

    async def _last(self, key: str) -> ordered_reader.Stored | None:
        """The last entry or deletion that a writer of the key signed. Only when the last of all is forged, the others
        that the bucket keeps are read."""
        where = self._prefix + key
        try:
            last = await ordered_reader.from_leader(self._bus.connection, self._stream, {"last_by_subj": where})
        except MessageGone:
            return None
        if self._signed(last):
            return last
        until, signed = last.seq, None
        reader = ordered_reader.OrderedReader(self._bus.connection, self._stream, [where], until=until)
        async for message, delivery in reader.messages():
            entry = _stored(message, delivery)
            if self._signed(entry):
                signed = entry
        return signed

    async def _write(self, key: str, message: Message, expect: int | None) -> int:
        payload, headers = encode(message)
        return await self._bus.publish_raw(self._prefix + key, payload, headers, expect=expect)


def _stored(message: Msg, delivery: DeliveryInfo) -> ordered_reader.Stored:
    return ordered_reader.Stored(
        message.subject, delivery.seq, delivery.time, message.data, dict(message.headers or {})
    )
