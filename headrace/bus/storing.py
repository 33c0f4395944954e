"""The writing side of a connection: records are named, signed, stored once, and stored again where another's took their
place.

Two writers share what a stream offers against repetitions: message ids, and the expected last sequence. So an id is a
MAC that the role alone can make. After "duplicate" the stored record is read, and after "another last sequence" the
records that came between: forged ones are stepped over, so that no other role can make a record vanish, or fence its
writer out.
"""

import asyncio
import time
from collections.abc import Callable
from secrets import token_hex

import msgspec

from headrace.bus import signatures
from headrace.bus.broker import keys
from headrace.bus.errors import ApiError, BusError, CorruptPayload, MessageGone, NoResponders, WrongSequence
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.connection import AWAY_S, TRANSIENT, NatsConnection, check
from headrace.bus.nats.records import Records
from headrace.bus.payloads import claim_checks
from headrace.bus.runtime import tracing
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, encode
from headrace.messages.operations import BlobRef
from headrace.metrics import process as metrics

MAX_INLINE = 1 << 20
"""Bytes of an encoded message above which it becomes a claim check."""
RETRY_S = 20.0
"""Seconds for which a publish is repeated while no stream takes it: an election in a cluster takes up to 7 s."""
_ID = "Nats-Msg-Id"
_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_FULL = 10077
_NO_SPACE = (10023, 10047)
_WRONG = (10071, 10164)


class _PubAck(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False


class Storing(Records):
    """Stores records."""

    def __init__(self, connection: NatsConnection, trust: signatures.Trust, key: keys.Key | None) -> None:
        super().__init__(connection, trust)
        self.role = connection.role
        self.key_of: Callable[[str, str], keys.Key | None] = lambda subject, kind: key
        """The key that signs a record, by its subject and type: the role's."""
        self.patience_s = 300.0
        """How long a publish waits on a full stream before it gives up."""
        self.on_full: Callable[[str], None] | None = None
        """Called once per publish that has to wait on a full stream."""

    async def publish(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str | None = None,
        expect: int | None = None,
        expect_filter: str | None = None,
    ) -> int:
        """Store a message and return its stream sequence.

        The publish is repeated for `AWAY_S` while the broker is away, and for `patience_s` while the stream is full.
        The message id stays the same, so the message is stored once. expect: last sequence on `expect_filter` or the
        subject, 0 for none yet; WrongSequence at once when it is another, forged records aside.
        """
        payload, headers = encode(message)
        ref: BlobRef | None = None
        owner = s.owner(subject, message)
        if self.shared_memory is not None and not owner and self.shared_memory.takes(subject, len(payload)):
            ref = await self.shared_memory.put(self._store_chunk, payload, headers)
        if ref is None and len(payload) > MAX_INLINE:
            stream = s.stream_of(subject)
            lives_s = int(stream.payloads_s) if stream is not None else 0
            ref = await claim_checks.put(self._store_chunk, payload, headers, owner, lives_s=lives_s)
        if ref is not None:
            payload, headers = encode(ref)
        return await self.publish_raw(
            subject, payload, headers, msg_id=msg_id, expect=expect, expect_filter=expect_filter
        )

    async def publish_raw(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str],
        *,
        msg_id: str | None = None,
        expect: int | None = None,
        expect_filter: str | None = None,
    ) -> int:
        """`publish` for bytes that are encoded already."""
        headers = self._named(subject, headers, msg_id)
        if expect is not None:
            headers[_EXPECT] = str(expect)
            if expect_filter is not None and expect_filter != subject:
                headers[f"{_EXPECT}-Subject"] = expect_filter
        with tracing.sending(subject, headers[_ID], len(payload)):
            tracing.inject(headers)
            started = time.perf_counter()
            seq = await self._store(subject, payload, headers)
            metrics.published(tracing.template(subject), len(payload), time.perf_counter() - started)
            return seq

    def _named(self, subject: str, headers: dict[str, str], name: str | None) -> dict[str, str]:
        """The headers with a message id: of the name, which others can read, or a random one."""
        bare = {header: value for header, value in headers.items() if header not in (_ID, signatures.ID_HEADER)}
        if name is None:
            return {**bare, _ID: token_hex(12)}
        key = self.key_of(subject, "")
        return {
            **bare, _ID: signatures.message_id(key.seed if key else "", subject, name), signatures.ID_HEADER: name
        }  # fmt: skip

    async def _store_chunk(self, subject: str, chunk: bytes, msg_id: str, lives_s: int = 0) -> int:
        headers = {**self._named(subject, {}, msg_id), _EXPECT: "0"}
        if lives_s:
            headers["Nats-TTL"] = f"{lives_s}s"
        try:
            return await self._store(subject, chunk, headers)
        except WrongSequence:
            if await claim_checks.chunk(self.connection, subject) != chunk:
                raise CorruptPayload(f"another content lies on {subject}: an operator has to purge it") from None
            raise

    def _signed(self, subject: str, kind: str, headers: dict[str, str], payload: bytes) -> dict[str, str]:
        if signatures.writers(subject, kind) is None:
            return headers
        key = self.key_of(subject, kind)
        if key is None:
            raise BusError(
                f"a {kind or 'deletion'} on {subject} has to be signed: connect with a credentials folder ([bus] "
                f"credentials), which holds the seed of role {self.role!r}"
            )
        return signatures.signed(key, subject, headers, payload)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        loop = asyncio.get_running_loop()
        started, pause, told = loop.time(), 0.05, False
        kind = signatures.kind_of(headers, payload)
        while True:
            began = loop.time()
            signed = self._signed(subject, kind, headers, payload)
            try:
                reply = await self.connection.call(subject, payload, headers=signed, timeout=5.0)
                check(reply.data)
                stored = msgspec.json.decode(reply.data, type=_PubAck)
                in_time = loop.time() - began < signatures.FRESH_S / 2
                if (in_time and not stored.duplicate) or await self._is_own(subject, headers, stored.seq):
                    return stored.seq
                headers = headers | {_ID: token_hex(12)}  # another's record has this id, or ours came too late
                continue
            except TRANSIENT as error:
                trouble: BusError = error
                budget = RETRY_S if isinstance(error, NoResponders) else AWAY_S
                if self.connection.closed.is_set():
                    raise
            except ApiError as error:
                if error.err_code in _WRONG:
                    ours, forged = await self._stored_after(subject, headers)
                    if ours:
                        return ours
                    if forged:
                        headers = headers | {_EXPECT: str(forged)}
                        continue
                    last = str(error).rpartition(" ")[2]
                    number = int(last) if last.isdigit() else -1
                    raise WrongSequence(f"{subject}: {error}", number) from None
                if error.status != 503:
                    raise BusError(f"the broker does not store {subject}: {error}") from error
                trouble, budget = error, RETRY_S
                if error.err_code == _FULL:
                    budget = self.patience_s
                if error.err_code in (_FULL, *_NO_SPACE) and not told and self.on_full is not None:
                    told = True
                    what = "stream" if error.err_code == _FULL else "broker's disk"
                    self.on_full(f"{subject}: the {what} is full, waiting ({error})")
            if loop.time() - started + pause > budget:
                if isinstance(trouble, NoResponders):
                    trouble = BusError("no stream takes it: not declared, or the broker's disk is full (see its log)")
                if isinstance(trouble, ApiError) and trouble.err_code in _NO_SPACE:
                    trouble = BusError(f"the broker's disk is full ({trouble})")
                raise BusError(f"{subject} could not be stored within {budget:g} s: {trouble}") from trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _is_own(self, subject: str, headers: dict[str, str], seq: int) -> bool:
        """Whether a stored record is this message, which the broker calls a repetition: another role may have used its
        id first."""
        try:
            stored = await ordered_reader.from_leader(self.connection, _stream_of(subject), {"seq": seq})
        except MessageGone:
            return True  # handled or purged already: nobody else can make its id
        return stored.subject == subject and stored.headers.get(_ID) == headers[_ID] and self._valid(stored)

    def _valid(self, stored: ordered_reader.Stored) -> bool:
        try:
            kind = signatures.kind_of(stored.headers, stored.data)
            self.trust.check(stored.subject, kind, stored.headers, stored.data, stored.time)
        except UnreadableMessage:
            return False
        return True

    async def _stored_after(self, subject: str, headers: dict[str, str]) -> tuple[int, int]:
        """The sequence under which this very message was stored by an earlier try, and the last record after the
        expected one where all of them are forged; 0 for none.

        The broker checks the expected sequence before it looks for duplicates, so a repeat is refused. The message that
        was stored under `expect` is the next valid one after it on the filter.
        """
        stream, over = _stream_of(subject), headers.get(f"{_EXPECT}-Subject", subject)
        seq, forged = int(headers[_EXPECT]), 0
        while True:
            try:
                stored = await ordered_reader.from_leader(
                    self.connection, stream, {"seq": seq + 1, "next_by_subj": over}
                )
            except MessageGone:
                return 0, forged
            if stored.subject == subject and stored.headers.get(_ID) == headers[_ID] and self._valid(stored):
                return stored.seq, 0
            if self._valid(stored):
                return 0, 0
            seq = forged = stored.seq


def _stream_of(subject: str) -> str:
    """The name of the stream that captures a subject."""
    if subject.startswith("$KV."):
        return f"KV_{subject.split('.')[1]}"
    stream = s.stream_of(subject)
    return stream.name if stream is not None else ""
