"""Deletes a user's records from the streams, and counts and hashes the deleted records.

If the subject names the user, one purge deletes all records on it. The subjects of queued requests, dead letters and
events name no user: such records are found by the user's hash in their content and deleted one by one.
"""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError
from headrace.bus.nats.ordered_reader import Stored
from headrace.bus.nats.received import Received
from headrace.bus.runtime import dead_letters
from headrace.ledger.lost_attempts import LostAttempt, lost_attempt
from headrace.messages.codec import TYPE_HEADER, UnreadableMessage, decode, plain
from headrace.messages.operations import DeadLetter, Rejected
from headrace.messages.product import PurgedRecords
from headrace.messages.subjects import DLQ, EVENT, TASK

BY_SUBJECT = (
    ("HR_FEEDBACK", "hr.feedback.*.{user}"),
    ("HR_FEEDBACK", "hr.fate.*.{user}"),
    ("HR_TRAJ", "hr.traj.*.{user}.*"),
    ("HR_TURN", "hr.turn.*.{user}.*"),
    ("HR_SCORE", "hr.score.*.*.{user}.*"),
)
"""Streams whose subjects name the user, and filters of these subjects. Their records are read, counted and hashed."""
UNREAD = (
    ("HR_BLOB", "hr.blob.{user}.>"),
    ("KV_HR_SESSION", "$KV.HR_SESSION.*.session.{user}.>"),
    ("KV_HR_SESSION", "$KV.HR_SESSION.*.session.*.{user}.>"),
)
"""Chunks of payloads and values of buckets, which the feedback actor may delete but not read."""
EVENTS = ("tool_log", "rejected", "event", "shadow_turn", "client_group")
"""Types of events that can name a user."""


class _Delivered(msgspec.Struct):
    stream_seq: int = 0


class _Consumer(msgspec.Struct):
    delivered: _Delivered


class Eraser:
    """One user's records, pass by pass; `records` sums all passes."""

    def __init__(self, bus: Bus, run: str, user: str) -> None:
        self._bus, self._run, self._user = bus, run, user
        self._kinds = tuple(EVENT.where(run=run, type=kind) for kind in EVENTS)
        self._found: dict[tuple[str, str], _Found] = {}
        for stream, template in (*BY_SUBJECT, *UNREAD):
            self._of(stream, template.format(user=user))
        for stream, filter in (
            ("HR_TASK", TASK.where(run=run)),
            ("HR_EVENT", " ".join(self._kinds)),
            ("HR_DLQ", DLQ.where()),
        ):
            self._of(stream, filter, by_content=True)
        self._after = {"HR_EVENT": 0, "HR_DLQ": 0}
        """Sequence up to which a stream was searched: a later pass reads only what came since."""

    async def erase(self) -> int:
        """Make one pass over all streams. Returns the number of deleted messages."""
        removed = 0
        for stream, template in BY_SUBJECT:
            removed += await self._purge(stream, template.format(user=self._user))
        for stream, template in UNREAD:
            filter = template.format(user=self._user)
            names = await self._bus.subjects(stream, filter)
            if names:
                erased = self._of(stream, filter)
                for name in sorted(names):
                    erased.add(0, name.encode())
                removed += await self._bus.purge(stream, subject=filter)
        return removed + await self._search()

    async def _purge(self, stream: str, filter: str) -> int:
        """Read and delete the records on a filter. A record that arrives in between is deleted in the next pass."""
        erased, last = self._of(stream, filter), 0
        async for record in self._bus.records(stream, filter):
            erased.add(record.seq, bytes(record.data))
            last = record.seq
        return await self._bus.purge(stream, subject=filter, before=last + 1) if last else 0

    async def _search(self) -> int:
        removed = 0
        async for record in self._naming("HR_EVENT", *self._kinds):
            removed += await self._delete("HR_EVENT", " ".join(self._kinds), record.seq, bytes(record.data))
        async for record in self._naming("HR_DLQ", DLQ.where()):
            await self._replace(record)
            removed += await self._delete("HR_DLQ", DLQ.where(), record.seq, bytes(record.data))
        return removed

    async def _naming(self, stream: str, *filters: str) -> AsyncIterator[Received[Any]]:
        """New records of a stream whose content names the user."""
        start = self._after[stream] + 1
        async for record in self._bus.records(stream, *filters, start=start):
            self._after[stream] = record.seq
            if mentions(bytes(record.data), record.headers, self._user):
                yield record

    async def _delete(self, stream: str, filter: str, seq: int, data: bytes) -> bool:
        deleted = await self._bus.delete(stream, seq, erase=True)
        if deleted:
            self._of(stream, filter, by_content=True).add(seq, data)
        return deleted

    async def _replace(self, record: Received[Any]) -> None:
        """Write a copy of a dead letter without its content, because the ledger counts dead letters and the headers
        name the attempt."""
        try:
            letter = decode(record.data, record.headers)
        except UnreadableMessage:
            return
        if isinstance(letter, DeadLetter):
            bare = msgspec.structs.replace(letter, payload=b"", reason="the content was purged with its user")
            await self._bus.publish(record.subject, bare, msg_id=f"purged-{record.seq}")

    async def queued(self) -> list[tuple[Stored, LostAttempt | None]]:
        """The user's requests in HR_TASK, also those that a rollout actor has taken, and their attempts."""
        return [
            (stored, lost_attempt(dead_letters.unpulled(self._run, stored, 0.0)))
            async for stored in dead_letters.queued(self._bus, self._run)
            if mentions(stored.data, stored.headers, self._user)
        ]

    async def taken(self) -> int:
        """Sequence in HR_TASK up to which rollout actors of the production lane took requests; 0 without any."""
        name = f"rollout-{self._run}-production"
        try:
            reply = await self._bus.connection.api(f"CONSUMER.INFO.HR_TASK.{name}")
        except ApiError as error:
            if error.status == 404:  # no rollout actor has served the lane yet
                return 0
            raise
        return msgspec.json.decode(reply, type=_Consumer).delivered.stream_seq

    async def drop_queued(self, stored: Stored) -> bool:
        """Delete a request from HR_TASK; False when it is gone."""
        return await self._delete("HR_TASK", TASK.where(run=self._run), stored.seq, stored.data)

    def _of(self, stream: str, filter: str, by_content: bool = False) -> "_Found":
        return self._found.setdefault((stream, filter), _Found(by_content))

    def records(self) -> tuple[PurgedRecords, ...]:
        """The streams and buckets that were searched, with the deleted records of all passes so far."""
        return tuple(erased.report(stream, filter) for (stream, filter), erased in self._found.items())


class _Found:
    """The deleted records of one filter."""

    def __init__(self, by_content: bool) -> None:
        self._by_content, self._count = by_content, 0
        self._ranges: list[list[int]] = []
        self._hash = hashlib.sha256()

    def add(self, seq: int, data: bytes) -> None:
        self._count += 1
        self._hash.update(hashlib.sha256(data).digest())
        if not seq:
            return
        if self._ranges and self._ranges[-1][1] + 1 == seq:
            self._ranges[-1][1] = seq
        else:
            self._ranges.append([seq, seq])

    def report(self, stream: str, filter: str) -> PurgedRecords:
        return PurgedRecords(
            stream=stream,
            filter=filter,
            by_content=self._by_content,
            count=self._count,
            sequences=tuple((first, last) for first, last in self._ranges),
            sha256=self._hash.hexdigest() if self._count else "",
        )


def mentions(data: bytes, headers: dict[str, str], user: str) -> bool:
    """Whether a stored record has a user's hash in its content. A dead letter without content does not count, because
    it only names an attempt."""
    contents = [_content(data, headers)]
    if headers.get(TYPE_HEADER, "").partition("/")[0] in ("dead_letter", "rejected"):
        try:
            letter = decode(data, headers)
        except UnreadableMessage:
            letter = None
        if isinstance(letter, DeadLetter | Rejected):
            if not letter.payload:
                return False
            contents.append(_content(letter.payload, letter.headers))
    return any(user.encode() in content for content in contents)


def _content(data: bytes, headers: dict[str, str]) -> bytes:
    """The bytes of a record without their compression; as they are stored where they cannot be decompressed."""
    try:
        return plain(data, headers)
    except UnreadableMessage:
        return data
