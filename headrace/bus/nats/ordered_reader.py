"""Reading a stream in its order, without acknowledgements: history, then live, across purges and reconnects.

The idea: an ephemeral pull consumer whose deliveries carry two numbers, the stream's sequence and its own running
count. As long as the count has no gap, nothing was lost. At a gap, a missing heartbeat or a reconnect the consumer is
deleted, and a new one starts after the last sequence that was returned. Purged sequences leave no gap in the count, so
gaps in a stream need no special case.

In a cluster the broker may put the consumer on a replica that has just restarted and lags: its "nothing more" is no
proof of the end. So a pass with an end asks the leader, whenever it was told that nothing follows before that end.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus.errors import ApiError, BusError, Disconnected, MessageGone, StreamMissing
from headrace.bus.nats.client import parse_headers
from headrace.bus.nats.connection import AWAY_S, TRANSIENT, NatsConnection
from headrace.bus.nats.received import DeliveryInfo, parse_reply

BATCH = 256
MAX_BYTES = 32 << 20
"""Bytes of one pull: bounds the unread messages in memory."""
HEARTBEAT_S = 5.0
EXPIRES_S = 30.0
_SECOND = 1_000_000_000
_NO_MESSAGE = 10037
_NO_STREAM = 10059


class _State(msgspec.Struct):
    last_seq: int = 0
    first_seq: int = 0
    messages: int = 0


class _StreamInfo(msgspec.Struct):
    state: _State


class _ConsumerInfo(msgspec.Struct):
    name: str
    num_pending: int = 0


async def last_seq(connection: NatsConnection, stream: str) -> int:
    """The stream's last sequence, 0 for an empty new one."""
    reply = await _api(connection, f"STREAM.INFO.{stream}")
    return msgspec.json.decode(reply, type=_StreamInfo).state.last_seq


async def _api(connection: NatsConnection, name: str, request: object = None) -> bytes:
    """An API call that is repeated while the broker restarts; its refusals are BusErrors that name it."""
    try:
        return await connection.patiently(lambda: connection.api(name, request))
    except ApiError as error:
        if error.err_code == _NO_STREAM:
            raise StreamMissing(f"{name}: {error}; an operator declares streams with: headrace bus declare") from error
        raise BusError(f"{name}: {error}") from error


class OrderedReader:
    """One ordered pass over a stream. `until` ends it after that sequence; None goes on for ever.

    With `last_per_subject` a pass with an end goes on until nothing follows: a subject that is written anew during the
    pass loses its old record, and its new one lies after the end.
    """

    def __init__(
        self,
        connection: NatsConnection,
        stream: str,
        filters: Sequence[str],
        *,
        start: int = 1,
        until: int | None = None,
        last_per_subject: bool = False,
    ) -> None:
        self.connection, self.stream, self.filters = connection, stream, tuple(filters)
        self.next, self.until = max(1, start), until
        self.pending = 0
        """Matching messages that were still to come at the last delivery."""
        self._last_per_subject = last_per_subject
        self._ended = False
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._names = itertools.count()
        self._consumer = ""

    async def messages(self) -> AsyncIterator[tuple[Msg, DeliveryInfo]]:
        """Messages in stream order, each once. A pass with an end raises Disconnected when the broker stays away."""
        loop = asyncio.get_running_loop()
        moved = loop.time()
        wake = self._wake
        self.connection.on_reconnect.append(wake)
        try:
            while True:
                async for item in self._session():
                    yield item
                    moved = loop.time()
                if self.until is not None and self.next > self.until:
                    return
                if self._ended and not await self._leader_has_more():
                    return
                if self.until is not None and loop.time() - moved > AWAY_S:
                    raise Disconnected(
                        f"{self.stream} was not read to its end for {AWAY_S:g} s: the broker is away, or a replica lags"
                    )
        finally:
            self.connection.on_reconnect.remove(wake)

    async def _leader_has_more(self) -> bool:
        """Whether the leader has records before the end although the replica reports none: then the pass goes on."""
        assert self.until is not None
        for subject in self.filters or (">",):
            request = {"seq": self.next, "next_by_subj": subject}
            try:
                if (await from_leader(self.connection, self.stream, request)).seq <= self.until:
                    self._ended = False
                    await asyncio.sleep(0.1)
                    return True
            except MessageGone:
                continue
        return False

    def _wake(self) -> None:
        self._queue.put_nowait(None)

    async def _on_message(self, message: Msg) -> None:
        self._queue.put_nowait(message)

    async def _session(self) -> AsyncIterator[tuple[Msg, DeliveryInfo]]:
        """Read by one consumer until it ends or breaks."""
        self._queue = asyncio.Queue()
        inbox = self.connection.inbox()
        try:
            subscription = await self.connection.subscribe(f"{inbox}.*", self._on_message, unbounded=True)
        except Disconnected:
            if self.connection.closed.is_set():
                raise
            return
        try:
            self.pending = await self._create()
            if self.until is not None and self.pending == 0:
                self._ended = True
                return
            async for item in self._pull(inbox):
                yield item
        except TRANSIENT:
            if self.connection.closed.is_set():
                raise
            await asyncio.sleep(0.05)
        finally:
            await self._forget(subscription)

    async def _create(self) -> int:
        config: dict[str, Any] = {
            # The inbox in lower case is not unique: inboxes of one connection differ in few letters.
            "name": f"{self.connection.role}-{secrets.token_hex(10)}",
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 60 * _SECOND,
            "replay_policy": "instant",
        }
        if self._last_per_subject and self.next == 1:
            config["deliver_policy"] = "last_per_subject"
        elif self.next > 1:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.next}
        else:
            config["deliver_policy"] = "all"
        if len(self.filters) == 1:
            config["filter_subject"] = self.filters[0]
        elif self.filters:
            config["filter_subjects"] = list(self.filters)
        elif self._last_per_subject:
            config["filter_subject"] = ">"
        self._consumer = config["name"]
        tail = f".{self.filters[0]}" if len(self.filters) == 1 else ""
        request = {"stream_name": self.stream, "config": config, "action": "create"}
        reply = await _api(self.connection, f"CONSUMER.CREATE.{self.stream}.{self._consumer}{tail}", request)
        return msgspec.json.decode(reply, type=_ConsumerInfo).num_pending

    async def _pull(self, inbox: str) -> AsyncIterator[tuple[Msg, DeliveryInfo]]:
        live = self.until is None
        expected, asked, quiet = 1, 0, 0
        while True:
            if asked <= BATCH // 2:
                await self._ask(inbox, BATCH, live)
                asked += BATCH
            try:
                async with asyncio.timeout(HEARTBEAT_S * 2 if live else 2.0):
                    message = await self._queue.get()
            except TimeoutError:
                if live or quiet:
                    return  # the broker lost this consumer: start again after the last sequence
                quiet, asked = 1, 0
                continue
            if message is None:
                return
            status = message.headers.get("Status") if message.headers else None
            if status is not None and not message.reply:
                if status == "100":
                    continue
                if status in ("404", "408"):
                    left = (message.headers or {}).get("Nats-Pending-Messages")
                    asked = max(0, asked - int(left)) if left else 0
                    if not live and status == "404":
                        self._ended = True
                        return
                    continue
                words = (message.headers or {}).get("Description", "").lower()
                if status == "409" and ("batch completed" in words or "exceeds maxbytes" in words):
                    asked = 0
                    continue
                return  # the consumer is gone, or its server is
            delivery = parse_reply(message.reply)
            if delivery.consumer_seq != expected:
                return
            expected, asked, quiet = expected + 1, asked - 1, 0
            self.next = delivery.seq + 1
            self.pending = delivery.pending
            end = None if self._last_per_subject else self.until
            if end is not None and delivery.seq > end:
                self._ended = True
                return
            yield message, delivery
            if self.until is not None and (delivery.pending == 0 or delivery.seq == end):
                self._ended = True
                return

    async def _ask(self, inbox: str, batch: int, live: bool) -> None:
        request: dict[str, Any] = {"batch": batch, "max_bytes": MAX_BYTES}
        if live:
            request |= {"expires": int(EXPIRES_S * _SECOND), "idle_heartbeat": int(HEARTBEAT_S * _SECOND)}
        else:
            request["no_wait"] = True
        await self.connection.wait_connected(20.0)
        await self.connection.publish_request(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}",
            msgspec.json.encode(request),
            f"{inbox}.{next(self._names)}",
        )

    async def _forget(self, subscription: Any) -> None:
        """End the subscription, and delete the consumer while the broker is reachable; otherwise it lapses by
        itself."""
        await self.connection.drop(subscription)
        if self._consumer and self.connection.connected:
            await self.connection.send(f"$JS.API.CONSUMER.DELETE.{self.stream}.{self._consumer}")


class _Raw(msgspec.Struct):
    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _RawReply(msgspec.Struct):
    message: _Raw


class Stored(msgspec.Struct):
    """One message of a stream as the broker keeps it."""

    subject: str
    seq: int
    time: float
    data: bytes
    headers: dict[str, str]


async def from_leader(connection: NatsConnection, stream: str, request: dict[str, Any]) -> Stored:
    """STREAM.MSG.GET: never stale. MessageGone."""
    try:
        reply = await connection.patiently(lambda: connection.api(f"STREAM.MSG.GET.{stream}", request))
    except ApiError as error:
        if error.err_code == _NO_MESSAGE:
            raise MessageGone(f"{stream} has no such message ({request}): {error}") from None
        raise BusError(f"{stream} cannot be read: {error}") from error
    raw = msgspec.json.decode(reply, type=_RawReply).message
    return Stored(raw.subject, raw.seq, seconds(raw.time), raw.data, parse_headers(raw.hdrs))


async def by_sequence(connection: NatsConnection, stream: str, seq: int) -> Stored:
    """Direct get of raw bytes from any replica. A replica that lags answers 404; then the leader is asked."""
    try:
        reply = await connection.call(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":%d}' % seq, timeout=10.0)
    except TRANSIENT:
        return await from_leader(connection, stream, {"seq": seq})
    headers = dict(reply.headers or {})
    if "Status" in headers:
        return await from_leader(connection, stream, {"seq": seq})
    subject, stamp = headers.pop("Nats-Subject"), headers.pop("Nats-Time-Stamp")
    for name in ("Nats-Stream", "Nats-Sequence", "Nats-Num-Pending", "Nats-Last-Sequence"):
        headers.pop(name, None)
    return Stored(subject, seq, seconds(stamp), reply.data, headers)


def seconds(stamp: str) -> float:
    """RFC 3339 with nanoseconds to seconds since the epoch."""
    whole, _, rest = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{rest}") if rest else 0.0)
