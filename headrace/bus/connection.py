"""The bus as an actor sees it: typed messages in, typed messages out, and errors that say what to do."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus import blobs, keys, reading, tracing
from headrace.bus.errors import (
    ApiError,
    BusError,
    BusTimeout,
    Disconnected,
    MessageGone,
    NoResponders,
    WrongSequence,
)
from headrace.bus.kv import KeyValue
from headrace.bus.link import Link, check
from headrace.bus.nearby import Nearby, fetch
from headrace.bus.permissions import READERS
from headrace.bus.received import Delivery, Received
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import UnknownType, decode, encode
from headrace.messages.operations import Ack, BlobRef

MAX_INLINE = 1 << 20
"""Bytes of an encoded message above which it becomes a claim check."""
RETRY_S = 20.0
"""How long a publish is tried again while the broker is away: an election in a cluster takes up to 7 s."""
_FULL = 10077
_NO_SPACE = (10023, 10047)
_WRONG = (10071, 10164)


class _PubAck(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False


class Bus:
    """One connection in one role."""

    def __init__(self, link: Link, *, id: str, node: str) -> None:
        self.link, self.role, self.id, self.node = link, link.role, id, node
        self.credentials: Path | None = None
        """Folder (or seed file) that it was connected with."""
        self.patience_s = 300.0
        """How long a publish waits on a full stream before it gives up."""
        self.on_full: Callable[[str], None] | None = None
        """Told once per publish that has to wait on a full stream."""
        self.nearby: Nearby | None = None
        """Where payloads lie that need not go through the broker (`use_nearby`)."""
        self._uploads: asyncio.Task[None] | None = None

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

        credentials: a folder of ``<role>.nk`` seeds, or one seed file.
        """
        try:
            key = keys.load(credentials, role)
        except ValueError as error:
            raise BusError(str(error)) from None
        id = id or f"{role}-{os.getpid()}-{token_hex(3)}"
        link = Link(url, role, key)
        await link.connect(f"{id}", timeout)
        bus = cls(link, id=id, node=node or s.token(socket.gethostname()))
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
        """Store a message; its stream sequence.

        Tried again for `RETRY_S` while the broker is away, and for `patience_s` while the stream is full; the message
        id stays the same, so a repeat is stored once. expect: last sequence on `expect_filter` or the subject, 0 for
        none yet; WrongSequence at once when it is another.
        """
        payload, headers = encode(message)
        ref: BlobRef | None = None
        owner = s.owner(subject, message)
        if self.nearby is not None and not owner and self.nearby.takes(subject, len(payload)):
            ref = await self.nearby.put(self._store_chunk, payload, headers)
        if ref is None and len(payload) > MAX_INLINE:
            ref = await blobs.put(self._store_chunk, payload, headers, owner)
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
            return await self._store(subject, payload, headers)

    async def _store_chunk(self, subject: str, chunk: bytes, msg_id: str) -> int:
        headers = {"Nats-Msg-Id": msg_id, "Nats-Expected-Last-Subject-Sequence": "0"}
        return await self._store(subject, chunk, headers)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        loop = asyncio.get_running_loop()
        started, pause, told = loop.time(), 0.05, False
        while True:
            try:
                reply = await self.link.call(subject, payload, headers=headers, timeout=5.0)
                check(reply.data)
                return msgspec.json.decode(reply.data, type=_PubAck).seq
            except (Disconnected, BusTimeout, NoResponders) as error:
                trouble: BusError = error
                budget = RETRY_S
                if self.link.closed.is_set():
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

        The broker looks at the expectation before it looks for duplicates. But what was stored under the expectation
        `expect` is the next message after it on the filter, so that is the one to look at.
        """
        stream = f"KV_{subject.split('.')[1]}" if subject.startswith("$KV.") else ""
        known = s.stream_of(subject)
        expect = int(headers["Nats-Expected-Last-Subject-Sequence"])
        over = headers.get("Nats-Expected-Last-Subject-Sequence-Subject", subject)
        try:
            request = {"seq": expect + 1, "next_by_subj": over}
            found = await reading.from_leader(self.link, known.name if known else stream, request)
        except MessageGone:
            return 0
        same = found.subject == subject and found.headers.get("Nats-Msg-Id") == headers["Nats-Msg-Id"]
        return found.seq if same else 0

    async def emit(self, subject: str, message: Message) -> None:
        """Core NATS, at most once; dropped while the broker is away."""
        payload, headers = encode(message)
        tracing.inject(headers)
        await self.link.send(subject, payload, headers)

    async def request(self, subject: str, message: Message, *, timeout: float = 10.0) -> Message:
        """Ask and wait for the answer. BusTimeout, NoResponders, Denied."""
        payload, headers = encode(message)
        with tracing.sending(subject, "", len(payload)):
            tracing.inject(headers)
            reply = await self.link.call(subject, payload, headers=headers, timeout=timeout)
        answer = decode(reply.data, reply.headers)
        return await self._resolve(answer)

    async def _resolve(self, message: Message) -> Message:
        if not isinstance(message, BlobRef):
            return message
        return decode(await blobs.get(self.link, message), _headers_of(message))

    async def respond(self, subject: str, handler: Callable[[Message], Awaitable[Message]], *, queue: str = "") -> Any:
        """Answer requests on a subject, each in a task of its own; `Actor.serve` is the usual way.

        A request that cannot be read, and a handler that raises, answer ``Ack(ok=False)``.
        """

        async def answer(raw: Msg) -> None:
            with tracing.processing(raw.subject, raw.headers or {}) as span:
                try:
                    reply = await handler(await self._resolve(decode(raw.data, raw.headers)))
                except Exception as error:
                    span.fail(error)
                    reply = Ack(ok=False, detail=f"{type(error).__name__}: {error}")
                payload, headers = encode(reply)
                if len(payload) > MAX_INLINE:
                    payload, headers = encode(await blobs.put(self._store_chunk, payload, headers))
                await self.link.send(raw.reply, payload, headers)

        return await self.listen_raw(subject, answer, queue=queue)

    async def listen_raw(self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = "") -> Any:
        """A core subscription that hands on raw messages, each in a task of its own."""
        tasks: set[asyncio.Task[None]] = set()

        async def spawn(raw: Msg) -> None:
            task = asyncio.ensure_future(callback(raw))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return await self.link.subscribe(subject, spawn, queue=queue)

    async def get(self, stream: str, seq: int) -> Received[Any]:
        """One message by sequence. MessageGone when it was purged."""
        return await self._received_stored(stream, await reading.by_sequence(self.link, stream, seq))

    async def last(self, stream: str, subject: str) -> Received[Any] | None:
        """The last message on a subject or filter, from the leader: it sees every acknowledged write."""
        try:
            stored = await reading.from_leader(self.link, stream, {"last_by_subj": subject})
        except MessageGone:
            return None
        return await self._received_stored(stream, stored)

    async def _received_stored(self, stream: str, stored: reading.Stored) -> Received[Any]:
        received: Received[Any] = Received(
            subject=stored.subject,
            data=stored.data,
            headers=stored.headers,
            stream=stream,
            seq=stored.seq,
            time=stored.time,
        )
        return await self.claim(received)

    async def claim(self, received: Received[Any]) -> Received[Any]:
        """Fetch the payload of a claim check; the message then is what was published. Errors go to `received.error`."""
        if received.type != BlobRef.type_name:
            return received
        try:
            ref = decode(received.data, received.headers)
            assert isinstance(ref, BlobRef)
            received.data = await fetch(self.link, self.nearby, ref, received.time)
            received.headers = {**received.headers, **_headers_of(ref)}
        except (UnknownType, MessageGone) as error:
            received.error = error
        return received

    def use_nearby(self, nearby: Nearby | None) -> None:
        """Lay large payloads of episodes into a folder of this node, and upload them when that is wanted."""
        self.nearby = nearby
        if nearby is not None and nearby.upload == "after" and self.role not in READERS:
            self._uploads = asyncio.create_task(nearby.upload_for_ever(self._store_chunk))

    async def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Received[Any]]:
        """All stored messages from sequence `start`, in order, up to the stream's last one at the time of the call."""
        until = await reading.last_seq(self.link, stream)
        if until < start:
            return
        reader = reading.Reader(self.link, stream, filters, start=start, until=until)
        async for message, delivery in reader.messages():
            yield await self._received(message, delivery)

    async def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Received[Any]]:
        """History, then live, in order, for ever; survives reconnects. Nothing is acknowledged."""
        async for message, delivery in reading.Reader(self.link, stream, filters, start=start).messages():
            yield await self._received(message, delivery)

    async def _received(self, message: Msg, delivery: Delivery) -> Received[Any]:
        received: Received[Any] = Received(
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            stream=delivery.stream,
            seq=delivery.seq,
            time=delivery.time,
        )
        return await self.claim(received)

    async def last_seq(self, stream: str) -> int:
        """Sequence of the stream's last message, 0 when it never had one."""
        return await reading.last_seq(self.link, stream)

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
            reply = await self.link.api(f"STREAM.PURGE.{stream}", request, timeout=30.0)
        except ApiError as error:
            raise BusError(f"{stream} cannot be purged: {error}") from error
        return int(msgspec.json.decode(reply).get("purged", 0))

    async def delete(self, stream: str, seq: int) -> bool:
        """Remove one message: the dead_letter role's, for what a work queue would keep for ever. False when gone."""
        try:
            await self.link.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except ApiError as error:
            if error.code in (400, 404) or "no message found" in str(error):
                return False
            raise
        return True

    async def close(self) -> None:
        """Send what waits, then close."""
        if self._uploads is not None and self.nearby is not None:
            self._uploads.cancel()
            await asyncio.gather(self._uploads, return_exceptions=True)
            if self.link.connected:
                with contextlib.suppress(BusError):  # the next process of this node goes on
                    await self.nearby.send(self._store_chunk)
        if self.nearby is not None:
            self.nearby.close()
        await self.link.close()

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _headers_of(ref: BlobRef) -> dict[str, str]:
    return {"Hr-Type": ref.type, "Hr-Encoding": ref.encoding} if ref.encoding else {"Hr-Type": ref.type}
