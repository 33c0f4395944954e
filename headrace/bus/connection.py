"""The bus as an actor sees it: typed messages in, typed messages out, and errors that say what to do."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus import signatures
from headrace.bus.broker import keys, tls
from headrace.bus.broker.callers import IN_PARTS
from headrace.bus.broker.permissions import ANSWERS, READERS
from headrace.bus.errors import ApiError, BusError
from headrace.bus.nats.addressing import misplaced
from headrace.bus.nats.connection import PART_HEADER, NatsConnection
from headrace.bus.nats.kv import KeyValue
from headrace.bus.nats.records import Skipped, headers_of
from headrace.bus.payloads import claim_checks
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.bus.runtime import tracing
from headrace.bus.storing import MAX_INLINE, Storing
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode, encode
from headrace.messages.operations import Ack, BlobRef

OWNER_HEADER = "Hr-Owner"
"""Of a request: the hash of the user whose data the request and its answer are."""
RawMessage = Msg
"""A message as it came, which `Bus.listen_raw` hands on: `subject`, `reply`, `headers` and `data`."""


_REPLY = ContextVar[str]("reply")
"""The reply subject of the request that a task answers in parts."""


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _StreamSubjects(msgspec.Struct):
    state: _Subjects
    total: int = 0


class Bus(Storing):
    """One connection in one role: request and answer here; storing is in `Storing`, reading streams in `Records`."""

    def __init__(
        self, connection: NatsConnection, trust: signatures.Trust, key: keys.Key | None, *, id: str, node: str
    ) -> None:
        super().__init__(connection, trust, key)
        self.id, self.node = id, node
        self.credentials: Path | None = None
        """Folder (or seed file) that it was connected with."""
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
        trust = signatures.Trust.of(credentials)
        bus = cls(connection, trust, key, id=id, node=node or s.token(socket.gethostname()))
        bus.credentials = Path(credentials) if credentials else None
        return bus

    async def emit(self, subject: str, message: Message) -> None:
        """Core NATS, at most once; dropped while the broker is away."""
        payload, headers = encode(message)
        tracing.inject(headers)
        await self.connection.send(subject, payload, headers)

    async def request(
        self,
        subject: str,
        message: Message,
        *,
        timeout: float = 10.0,
        owner: str = "",
        on_part: Callable[[Message], None] | None = None,
    ) -> Message:
        """Ask and wait for the answer. BusTimeout, NoResponders, Denied.

        A request or an answer over 1 MiB travels as a claim check that expires; owner: the hash of the user whose data
        it then is. on_part: gets the parts that a service of `callers.IN_PARTS` sends before its answer, in order; some
        may be missing.
        """

        def part(raw: Msg) -> None:
            if on_part is not None:
                with contextlib.suppress(UnreadableMessage):  # the answer is whole
                    on_part(decode(raw.data, raw.headers))

        payload, headers = encode(message)
        if len(payload) > MAX_INLINE:
            ref = await claim_checks.put(self._store_chunk, payload, headers, owner, lives_s=claim_checks.REQUEST_S)
            payload, headers = encode(ref)
        if owner:
            headers = {**headers, OWNER_HEADER: owner}
        with tracing.sending(subject, "", len(payload)):
            tracing.inject(headers)
            reply = await self.connection.call(subject, payload, headers=headers, timeout=timeout, on_part=part)
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
        subject is not the broker's own (`permissions.ANSWERS`) is ignored. While the handler of a caller of
        `callers.IN_PARTS` runs, `say` sends parts of the answer.
        """
        _, _, service, caller, *_ = subject.split(".")
        in_parts = IN_PARTS.get(service) == caller

        async def answer(raw: Msg) -> None:
            if not raw.reply.startswith(ANSWERS.removesuffix(">")):
                return  # an answer elsewhere than to the caller's account would be a publish in this role's name
            if in_parts:
                _REPLY.set(raw.reply)
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
                if in_parts:  # the broker keeps the reply subject until an empty message ends the answer
                    await self.connection.send(raw.reply)

        return await self.listen_raw(subject, answer, queue=queue)

    async def say(self, message: Message) -> None:
        """Send a part of the answer whose handler runs. At most once; the answer itself has to be whole."""
        payload, headers = encode(message)
        await self.connection.send(_REPLY.get(), payload, {**headers, PART_HEADER: "1"})

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
                    self.skip(
                        Skipped("", next(self._unstored), raw.subject, str(error), isinstance(error, signatures.Forged))
                    )
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
            if error.status in (400, 404) or "no message found" in str(error):
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
