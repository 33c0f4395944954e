"""The bus as an actor sees it: typed messages in, typed messages out, and errors that say what to do."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus.broker import keys, tls
from headrace.bus.broker.permissions import ANSWERS, READERS
from headrace.bus.errors import ApiError, BusError, MessageGone, NoResponders, WrongSequence
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.addressing import misplaced
from headrace.bus.nats.connection import AWAY_S, TRANSIENT, NatsConnection, check
from headrace.bus.nats.kv import KeyValue
from headrace.bus.nats.records import Records, Skipped, headers_of
from headrace.bus.payloads import claim_checks
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.bus.runtime import tracing
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode, encode
from headrace.messages.operations import Ack, BlobRef
from headrace.metrics import process as metrics

OWNER_HEADER = "Hr-Owner"
"""Of a request: the hash of the user whose data the request and its answer are."""
RawMessage = Msg
"""A message as it came, which `Bus.listen_raw` hands on: `subject`, `reply`, `headers` and `data`."""
MAX_INLINE = 1 << 20
"""Bytes of an encoded message above which it becomes a claim check."""
RETRY_S = 20.0
"""Seconds for which a publish is repeated while no stream takes it: an election in a cluster takes up to 7 s."""

_FULL = 10077
_NO_SPACE = (10023, 10047)
_WRONG = (10071, 10164)


class _PubAck(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _StreamSubjects(msgspec.Struct):
    state: _Subjects
    total: int = 0


class Bus(Records):
    """One connection in one role: publish, request and answer here; reading streams is in `Records`."""

    def __init__(self, connection: NatsConnection, *, id: str, node: str) -> None:
        super().__init__(connection)
        self.role, self.id, self.node = connection.role, id, node
        self.credentials: Path | None = None
        """Folder (or seed file) that it was connected with."""
        self.patience_s = 300.0
        """How long a publish waits on a full stream before it gives up."""
        self.on_full: Callable[[str], None] | None = None
        """Called once per publish that has to wait on a full stream."""
        self._uploads: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        """Tasks that send answers. They are held here because the loop holds tasks weakly and a subscription may end
        before its last answer is sent."""
        self._unstored = itertools.count(1)
        """Counter that numbers unreadable core messages, which have no sequence."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        role: str,
        id: str = "",
        credentials: str | Path | None = None,
        node: str = "",
        timeout: float = 5.0,
    ) -> "Bus":
        """Connect within `timeout` seconds. BusError says in one sentence why not.

        credentials: a folder of ``<role>.nk`` seeds, or one seed file. With ``ca.pem`` beside the seeds the connection
        is by TLS (broker/tls.py).
        """
        try:
            key = keys.load(credentials, role)
            context = tls.client_context(Path(credentials)) if credentials else None
        except ValueError as error:
            raise BusError(str(error)) from None
        id = id or f"{role}-{os.getpid()}-{token_hex(3)}"
        connection = NatsConnection(url, role, key, context)
        await connection.connect(id, timeout)
        bus = cls(connection, id=id, node=node or s.token(socket.gethostname()))
        bus.credentials = Path(credentials) if credentials else None
        return bus

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
        subject, 0 for none yet; WrongSequence at once when it is another.
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
        msg_id = msg_id or token_hex(12)
        headers = {**headers, "Nats-Msg-Id": msg_id}
        if expect is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect)
            if expect_filter is not None and expect_filter != subject:
                headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect_filter
        with tracing.sending(subject, msg_id, len(payload)):
            tracing.inject(headers)
            started = time.perf_counter()
            seq = await self._store(subject, payload, headers)
            metrics.published(tracing.template(subject), len(payload), time.perf_counter() - started)
            return seq

    async def _store_chunk(self, subject: str, chunk: bytes, msg_id: str, lives_s: int = 0) -> int:
        headers = {"Nats-Msg-Id": msg_id, "Nats-Expected-Last-Subject-Sequence": "0"}
        if lives_s:
            headers["Nats-TTL"] = f"{lives_s}s"
        return await self._store(subject, chunk, headers)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        loop = asyncio.get_running_loop()
        started, pause, told = loop.time(), 0.05, False
        while True:
            try:
                reply = await self.connection.call(subject, payload, headers=headers, timeout=5.0)
                check(reply.data)
                return msgspec.json.decode(reply.data, type=_PubAck).seq
            except TRANSIENT as error:
                trouble: BusError = error
                budget = RETRY_S if isinstance(error, NoResponders) else AWAY_S
                if self.connection.closed.is_set():
                    raise
            except ApiError as error:
                if error.err_code in _WRONG:
                    ours = await self._stored_before(subject, headers)
                    if ours:
                        return ours
                    last = str(error).rpartition(" ")[2]
                    number = int(last) if last.isdigit() else -1
                    raise WrongSequence(f"{subject}: {error}", number) from None
                if error.code != 503:
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

    async def _stored_before(self, subject: str, headers: dict[str, str]) -> int:
        """The sequence under which this very message was stored by an earlier try, 0 when it was not.

        The broker checks the expected sequence before it looks for duplicates, so a repeat is refused. The message that
        was stored under `expect` is the next one after it on the filter, so this reads that one.
        """
        stream = f"KV_{subject.split('.')[1]}" if subject.startswith("$KV.") else ""
        if captured_by := s.stream_of(subject):
            stream = captured_by.name
        expect = int(headers["Nats-Expected-Last-Subject-Sequence"])
        over = headers.get("Nats-Expected-Last-Subject-Sequence-Subject", subject)
        try:
            request = {"seq": expect + 1, "next_by_subj": over}
            stored = await ordered_reader.from_leader(self.connection, stream, request)
        except MessageGone:
            return 0
        same = stored.subject == subject and stored.headers.get("Nats-Msg-Id") == headers["Nats-Msg-Id"]
        return stored.seq if same else 0

    async def emit(self, subject: str, message: Message) -> None:
        """Core NATS, at most once; dropped while the broker is away."""
        payload, headers = encode(message)
        tracing.inject(headers)
        await self.connection.send(subject, payload, headers)

    async def request(self, subject: str, message: Message, *, timeout: float = 10.0, owner: str = "") -> Message:
        """Ask and wait for the answer. BusTimeout, NoResponders, Denied.

        A request or an answer over 1 MiB travels as a claim check that expires; owner: the hash of the user whose data
        it then is.
        """
        payload, headers = encode(message)
        if len(payload) > MAX_INLINE:
            ref = await claim_checks.put(self._store_chunk, payload, headers, owner, lives_s=claim_checks.REQUEST_S)
            payload, headers = encode(ref)
        if owner:
            headers = {**headers, OWNER_HEADER: owner}
        with tracing.sending(subject, "", len(payload)):
            tracing.inject(headers)
            reply = await self.connection.call(subject, payload, headers=headers, timeout=timeout)
        answer = decode(reply.data, reply.headers)
        return await self._resolve(answer)

    async def _resolve(self, message: Message) -> Message:
        if not isinstance(message, BlobRef):
            return message
        return decode(await claim_checks.get(self.connection, message), headers_of(message))

    async def put_blob(self, message: Message) -> BlobRef:
        """Store a message on HR_BLOB under the sha256 of its payload; the reference to publish."""
        payload, headers = encode(message)
        return await claim_checks.put(self._store_chunk, payload, headers)

    async def get_blob(self, ref: BlobRef) -> Message:
        """The message behind a reference. MessageGone when it was purged, BusError when its content has other bytes."""
        return await self._resolve(ref)

    async def respond(self, subject: str, handler: Callable[[Message], Awaitable[Message]], *, queue: str = "") -> Any:
        """Answer requests on a subject, each in a task of its own; `Actor.serve` is the usual way.

        A request that cannot be read, and a handler that raises, answer ``Ack(ok=False)``. A request whose reply
        subject is not the broker's own (`permissions.ANSWERS`) is ignored.
        """

        async def answer(raw: Msg) -> None:
            if not raw.reply.startswith(ANSWERS.removesuffix(">")):
                return  # an answer elsewhere than to the caller's account would be a publish in this role's name
            with tracing.processing(raw.subject, raw.headers or {}) as span:
                try:
                    payload, headers = encode(await handler(await self._resolve(decode(raw.data, raw.headers))))
                    if len(payload) > MAX_INLINE:
                        owner = (raw.headers or {}).get(OWNER_HEADER, "")
                        owner = owner if owner.isalnum() else ""  # it becomes a token of a subject
                        ref = await claim_checks.put(
                            self._store_chunk, payload, headers, owner, lives_s=claim_checks.REQUEST_S
                        )
                        payload, headers = encode(ref)
                except (
                    Exception
                ) as error:  # an answer that cannot be encoded or stored is answered too, else the caller waits in vain
                    span.fail(error)
                    payload, headers = encode(Ack(ok=False, detail=ascii(f"{type(error).__name__}: {error}")))
                await self.connection.send(raw.reply, payload, headers)

        return await self.listen_raw(subject, answer, queue=queue)

    async def listen(self, subject: str, handler: Callable[[Message], Awaitable[None]]) -> Any:
        """Handle core messages, at most once each, one after the other. Unreadable ones are counted and skipped."""

        async def handle(raw: Msg) -> None:
            with tracing.processing(raw.subject, raw.headers or {}):
                try:
                    message = decode(raw.data, raw.headers)
                    reason = misplaced(raw.subject, message)
                    if reason:
                        raise UnreadableMessage(reason)
                except UnreadableMessage as error:
                    self.skip(Skipped("", next(self._unstored), raw.subject, str(error)))
                    return
                await handler(message)

        return await self.connection.subscribe(subject, handle)

    async def listen_raw(
        self, subject: str, callback: Callable[[RawMessage], Awaitable[None]], *, queue: str = ""
    ) -> Any:
        """A core subscription that hands on raw messages, each in a task of its own."""

        async def spawn(raw: Msg) -> None:
            task = asyncio.ensure_future(callback(raw))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        return await self.connection.subscribe(subject, spawn, queue=queue)

    async def kv(self, bucket: str) -> KeyValue:
        """A key-value bucket of `messages.subjects.KEY_VALUES`."""
        if bucket not in s.KEY_VALUES:
            raise BusError(f"there is no bucket {bucket!r}; there are {', '.join(s.KEY_VALUES)}")
        return KeyValue(self, bucket)

    async def purge(self, stream: str, *, subject: str | None = None, before: int | None = None) -> int:
        """Delete messages of a stream: on a subject or filter, below a sequence, or both; how many. Denied."""
        request: dict[str, Any] = {}
        if subject is not None:
            request["filter"] = subject
        if before is not None:
            if before <= 1:
                return 0
            request["seq"] = before
        try:
            reply = await self.connection.api(f"STREAM.PURGE.{stream}", request, timeout=30.0)
        except ApiError as error:
            raise BusError(f"{stream} cannot be purged: {error}") from error
        return int(msgspec.json.decode(reply).get("purged", 0))

    async def delete(self, stream: str, seq: int, *, erase: bool = False) -> bool:
        """Remove one message: one that a work queue would keep for ever, or one of a user. False when it is gone.

        erase: overwrite its bytes in the broker's store as well. Denied.
        """
        try:
            await self.connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": not erase})
        except ApiError as error:
            if error.code in (400, 404) or "no message found" in str(error):
                return False
            raise
        return True

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """The subjects of a stream that match a filter, with the number of messages on each. Reads no message."""
        counts: dict[str, int] = {}
        while True:
            request = {"subjects_filter": filter, "offset": len(counts)}
            reply = await self.connection.patiently(
                lambda request=request: self.connection.api(f"STREAM.INFO.{stream}", request)  # type: ignore[misc]
            )
            page = msgspec.json.decode(reply, type=_StreamSubjects)
            counts |= page.state.subjects or {}
            if not page.state.subjects or len(counts) >= page.total:
                return counts

    def use_shared_memory(self, shared_memory: SharedMemoryStore | None) -> None:
        """Pass large payloads of episodes to processes of this node through files; upload them as `[bus]` says."""
        self.shared_memory = shared_memory
        if shared_memory is not None and shared_memory.upload == "after" and self.role not in READERS:
            self._uploads = asyncio.create_task(shared_memory.upload_for_ever(self._store_chunk))

    async def close(self) -> None:
        """Flush the send buffer, cancel the answers under way, then close: no task outlives the connection."""
        answering = self._answering - {asyncio.current_task()}
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        if self._uploads is not None and self.shared_memory is not None:
            self._uploads.cancel()
            await asyncio.gather(self._uploads, return_exceptions=True)
            if self.connection.connected:
                with contextlib.suppress(BusError):  # the next process of this node continues
                    await self.shared_memory.send(self._store_chunk)
        if self.shared_memory is not None:
            self.shared_memory.close()
        await self.connection.close()

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
