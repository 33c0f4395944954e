"""One connection to the broker, with requests that fail fast.

nats-py leaves five gaps that cost an actor minutes: a forbidden publish is only seen as a timeout, `connect` with bad
credentials retries for ever, a request that was in flight when the connection broke waits for its timeout, a task that
is cancelled while nats-py flushes continues as if it had not been cancelled, and so does its reconnection, which then
keeps the process from ending. `NatsConnection` keeps its own table of waiting requests, so that a refusal or a break
ends exactly the requests that it concerns, and it raises swallowed cancellations again.
"""

import asyncio
import itertools
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from headrace.bus.broker.keys import Key
from headrace.bus.errors import (
    ApiError,
    BusError,
    BusTimeout,
    CredentialsRefused,
    Denied,
    Disconnected,
    NoBroker,
    NoResponders,
)
from headrace.bus.nats.client import NatsClient, NoTls

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
TRANSIENT = (Disconnected, BusTimeout, NoResponders)
"""The errors of a broker that restarts or pauses."""
AWAY_S = 120.0
"""Seconds for which a request is repeated while the broker does not answer: longer than a host that pauses for a
minute, because an actor that gives up earlier is only restarted and then waits for the same broker."""
CLOSE_S = 5.0
"""Seconds in which a connection closes in order; then it is cut."""
T = TypeVar("T")
PART_HEADER = "Hr-Part"
"""Of a part of an answer, which comes before the answer itself."""
LONGEST_SUBJECT = 3000
"""Characters; the broker closes a connection that sends a line of more than 4 KiB, or one that it cannot parse."""
PENDING_BYTES = 64 << 20
"""Bytes that may be buffered for sending on one connection; nats-py's default of 2 MiB stalls a chunked payload."""


async def _faithfully(work: Awaitable[T]) -> T:
    """Await nats-py's code, then raise a cancellation that nats-py swallowed.

    Disconnected when nats-py cancels this task by mistake: one of its own tasks was cancelled while both tasks waited
    for the same future.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        result = await work
    except asyncio.CancelledError:
        if task.cancelling() > before:
            raise
        raise Disconnected("the connection to the broker broke") from None
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _time_out(future: asyncio.Future[Msg], subject: str, seconds: float) -> None:
    if not future.done():
        future.set_exception(BusTimeout(f"no answer on {subject} within {seconds:g} s"))


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    error: _Error | None = None


_reply = msgspec.json.Decoder(_Reply)


class NatsConnection:
    """A nats-py client of one role. `call` is request and reply, `api` is JetStream's JSON interface."""

    def __init__(self, url: str, role: str, key: Key | None, tls: ssl.SSLContext | None = None) -> None:
        """tls: required with this context; None: as the broker wants it, with the system's authorities."""
        self.url, self.role, self._tls = url, role, tls
        self.client = NatsClient()
        self.client.tls_only = tls is not None
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_error: list[Callable[[str], None]] = []
        self.closed = asyncio.Event()
        """Set when the connection is gone for good: closed by us, or refused by the broker after a reconnect."""
        self.dropped = 0
        """Core messages given up because the broker was away, or because a reader was too slow."""
        self._key = key
        self._connected = asyncio.Event()
        self._fatal: asyncio.Future[str] | None = None
        self._prefix = f"_INBOX.{role}"
        self._mux = ""
        self._tokens = itertools.count()
        self.incarnation = 0
        """Number of reconnects."""
        self._waiting: dict[str, tuple[asyncio.Future[Msg], str]] = {}
        self._parts: dict[str, Callable[[Msg], None]] = {}
        self._denied: dict[str, str] = {}
        self._told: dict[str, float] = {}
        self._untrusted = ""
        """Why the last attempt to connect failed in its handshake."""

    async def connect(self, name: str, timeout: float) -> None:
        """Connect within `timeout` seconds. BusError says in one sentence why it could not be done."""
        self._fatal = asyncio.get_running_loop().create_future()
        options: dict[str, Any] = {}
        if self._key is not None:
            self.client.set_public_key(self._key.public)
            options["signature_cb"] = self._key.sign
        if self._tls is not None:
            options["tls"] = self._tls
        attempt = asyncio.ensure_future(
            self.client.connect(
                self.url.split(","),  # several brokers of one cluster
                name=name,
                inbox_prefix=self._prefix,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                connect_timeout=max(1, int(timeout)),
                ping_interval=20,
                max_outstanding_pings=3,
                pending_size=PENDING_BYTES,
                **options,
            )
        )
        both: set[asyncio.Future[Any]] = {attempt, self._fatal}
        await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
            self._connected.set()
            await self._open_mux()
            return
        if attempt.done() and not attempt.cancelled():
            reason = str(attempt.exception())
        else:
            reason = self._fatal.result() if self._fatal.done() else str(self.client.last_error or "no answer")
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
        await self._abandon()
        if "authorization" in reason.lower():
            raise CredentialsRefused(f"the broker at {self.url} refuses the credentials of role {self.role!r}")
        if self._untrusted:
            raise NoBroker(f"there is no TLS connection to the broker at {self.url}: {self._untrusted}")
        raise NoBroker(f"no broker answers at {self.url} ({reason})")

    async def _abandon(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):  # nats-py waits until a stopped broker has read all that was sent
                await _faithfully(self.client.close())
        except TimeoutError:
            self.client.abort()
        except (OSError, nats.errors.Error, RuntimeError, Disconnected):
            pass
        self.closed.set()

    async def _open_mux(self) -> None:
        self._mux = self.client.new_inbox()
        await self.client.subscribe_at_once(f"{self._mux}.*", self._on_reply)

    @property
    def connected(self) -> bool:
        """Whether a message sent now goes out at once."""
        return self._connected.is_set() and not self.closed.is_set()

    async def wait_connected(self, timeout: float) -> None:
        """Return when connected. Disconnected after `timeout` seconds or when closed for good."""
        if self.connected:  # without a timer, because every request comes here
            return
        if self.closed.is_set():
            raise Disconnected("the connection to the broker is closed")
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        except TimeoutError:
            raise Disconnected(f"the broker at {self.url} has been away for {timeout:g} s") from None
        if self.closed.is_set():
            raise Disconnected("the connection to the broker is closed")

    async def call(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
        on_part: Callable[[Msg], None] | None = None,
    ) -> Msg:
        """Request and reply. on_part: gets what the service sends before its answer. Denied, NoResponders,
        Disconnected, BusTimeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await self.wait_connected(timeout)
        token = f"{next(self._tokens):x}"
        future: asyncio.Future[Msg] = loop.create_future()
        self._waiting[token] = (future, subject)
        overdue = loop.call_at(deadline, _time_out, future, subject, timeout)
        if on_part is not None:
            self._parts[token] = on_part
        try:
            await self._send(subject, payload, f"{self._mux}.{token}", headers)
            message = await future
        finally:
            overdue.cancel()
            self._waiting.pop(token, None)
            self._parts.pop(token, None)
        if message.headers and message.headers.get("Status") == "503" and not message.data:
            raise NoResponders(f"nobody answers on {subject}")
        return message

    async def api(self, name: str, request: object = None, *, timeout: float = 5.0) -> bytes:
        """A JetStream API request such as ``STREAM.INFO.HR_TASK``; the raw JSON of the answer. ApiError."""
        payload = b"" if request is None else msgspec.json.encode(request)
        reply = await self.call(f"$JS.API.{name}", payload, timeout=timeout)
        check(reply.data)
        return reply.data

    async def patiently(self, what: Callable[[], Awaitable[T]], budget: float = AWAY_S) -> T:
        """Repeat an idempotent request while the broker is away or starting, for `budget` seconds."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + budget, 0.05
        while True:
            try:
                return await what()
            except (*TRANSIENT, ApiError) as error:
                if isinstance(error, ApiError) and error.status != 503:
                    raise
                if self.closed.is_set() or loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def send(self, subject: str, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """Core publish, at most once; False when it was dropped because the broker is away."""
        if not self.connected:
            self.dropped += 1
            return False
        await self._send(subject, payload, "", headers)
        return True

    async def _send(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        if len(subject) > LONGEST_SUBJECT or " " in subject or not subject.isprintable():
            raise BusError(
                f"cannot send on {subject!r:.200}: expected at most {LONGEST_SUBJECT} characters without spaces"
            )
        try:
            await _faithfully(
                self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
            )
        except nats.errors.MaxPayloadError:
            raise BusError(f"{len(payload)} bytes on {subject} are over the broker's limit for one message") from None
        except nats.errors.OutboundBufferLimitError:
            raise Disconnected(f"the broker is away and {subject} does not fit the send buffer") from None
        except nats.errors.ConnectionClosedError:
            raise Disconnected("the connection to the broker is closed") from None
        except nats.errors.Error as error:
            raise BusError(f"cannot send on {subject!r}: {error}") from error

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = "", unbounded: bool = False
    ) -> Subscription:
        """A core subscription, confirmed by the broker. Denied when the role may not read there.

        nats-py subscribes again at a reconnect. So when the broker restarts in between, only the confirmation is
        asked for again, for `AWAY_S`; then Disconnected.
        """
        await self.wait_connected(AWAY_S)
        limits: dict[str, Any] = {"pending_bytes_limit": 0} if unbounded else {}
        subscription = await _faithfully(self.client.subscribe(subject, queue=queue, cb=callback, **limits))
        try:
            await self.patiently(self.flush)
        except BaseException:
            self.client.forget(subscription)
            raise
        if self._denied.pop(f"subscription {subject.lower()}", None):
            raise Denied(self.role, "subscribe to", subject)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription in order: what the broker sent before is still handed to its callback."""
        if not self.connected:
            self.client.forget(subscription)
            return
        try:
            async with asyncio.timeout(5.0):
                await _faithfully(self.client.announce_unsubscribe(subscription))
                await self.flush()
                await self.client.deliveries_handled(subscription)
        except (TimeoutError, Disconnected):
            pass
        self.client.forget(subscription)

    async def drop(self, subscription: Subscription) -> None:
        """End a subscription at once; what is under way is lost."""
        self.client.forget(subscription)
        if self.connected:
            await _faithfully(self.client.announce_unsubscribe(subscription))

    async def publish_request(self, subject: str, payload: bytes, reply: str) -> None:
        """Send a request whose answers come to a subscription of the caller's."""
        await self._send(subject, payload, reply, None)

    def inbox(self) -> str:
        """A fresh inbox that this role may read."""
        return self.client.new_inbox()

    async def flush(self, timeout: float = 5.0) -> None:
        """Return when everything sent so far has reached the broker and its refusals have arrived here.

        Disconnected after `timeout` seconds, and at once when the connection is broken or breaks. nats-py writes its
        PING straight to the socket, before commands that still wait for its flusher, so those are flushed first.
        """
        incarnation = self.incarnation
        try:
            async with asyncio.timeout(timeout):
                await _faithfully(self.client.write_pending())
                await _faithfully(self.client.flush(timeout=10))
            # While it reconnects nats-py returns without a confirmation.
            if not (self.connected and self.client.is_connected) or self.incarnation != incarnation:
                raise Disconnected(f"the connection to {self.url} broke")
        except (TimeoutError, nats.errors.Error) as error:
            reason = str(error) or f"no answer within {timeout:g} s"
            raise Disconnected(f"the broker at {self.url} does not confirm: {reason}") from None

    async def close(self) -> None:
        """Flush what was sent, then close."""
        if self.closed.is_set():
            return
        try:
            if self.connected:
                await self.flush(2.0)
        except Disconnected:
            pass
        self._connected.clear()
        await self._abandon()
        self._end_all(Disconnected("the connection was closed"))

    def _on_reply(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        entry = self._waiting.get(token)
        if entry is None or entry[0].done():
            return
        on_part = self._parts.get(token)
        if on_part is not None and message.headers and PART_HEADER in message.headers:
            on_part(message)
        elif message.data or message.headers or on_part is None:  # an empty one is the end of an answer in parts
            entry[0].set_result(message)

    async def _on_error(self, error: Exception) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # An attempt to connect failed while its task was cancelled, and nats-py lost the cancellation.
            raise asyncio.CancelledError
        text = str(error)
        if isinstance(error, ssl.SSLError | NoTls) and self._fatal is not None and not self._fatal.done():
            trusted = "ca.pem in the credentials folder" if self._tls is not None else "this machine's authorities"
            self._untrusted = f"{getattr(error, 'verify_message', '') or text} (checked against {trusted})"
            self._fatal.set_result(text)
        denied = _DENIED.search(text.lower())
        if denied:
            kind, subject = denied.groups()
            if kind == "subscription":
                self._denied[f"subscription {subject}"] = text
            hit = False
            for future, waiting in list(self._waiting.values()):
                if kind == "publish" and waiting.lower() == subject and not future.done():
                    future.set_exception(Denied(self.role, "publish on", waiting))
                    hit = True
            if not hit:
                self._tell(f"role {self.role!r} may not {kind} {subject}")
            return
        if isinstance(error, nats.errors.SlowConsumerError):
            self.dropped += 1
            self._tell(f"a reader of {error.subject} is too slow: a message was dropped")
            return
        if "authorization" in text.lower() and self._fatal is not None and not self._fatal.done():
            self._fatal.set_result(text)

    def _tell(self, text: str) -> None:
        """Tell the listeners; the same text at most once a second."""
        now = asyncio.get_running_loop().time()
        if now - self._told.get(text, -1.0) < 1.0:
            return
        self._told[text] = now
        for listener in self.on_error:
            listener(text)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self.client.expect_no_pongs()
        self._end_all(Disconnected(f"the connection to {self.url} broke"))

    async def _on_reconnected(self) -> None:
        self._connected.set()
        self.incarnation += 1
        for listener in list(self.on_reconnect):
            listener()

    async def _on_closed(self) -> None:
        self.closed.set()
        self._connected.set()
        self._end_all(Disconnected("the connection to the broker is closed"))

    def _end_all(self, error: BusError) -> None:
        for future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)


def check(data: bytes) -> None:
    """ApiError when a JetStream answer carries one."""
    if b'"error"' not in data[:4096]:
        return
    error = _reply.decode(data).error
    if error is not None:
        raise ApiError(error.description, error.code, error.err_code)
