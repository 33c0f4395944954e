"""A message that came from a stream (or was read from one), and how to settle it."""

import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from headrace.bus.nats.addressing import misplaced
from headrace.bus.signatures import Trust, kind_of
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode
from headrace.messages.operations import Advisory

if TYPE_CHECKING:
    from headrace.bus.nats.connection import NatsConnection

T = TypeVar("T", bound=Message)

_NO_HEADERS: dict[str, str] = {}


class DeliveryInfo(msgspec.Struct, frozen=True):
    """The fields of a delivery's acknowledgement subject."""

    stream: str
    consumer: str
    deliveries: int
    seq: int
    consumer_seq: int
    time: float
    pending: int


def parse_reply(reply: str) -> DeliveryInfo:
    """``$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>``, or the form with a domain."""
    tokens = reply.split(".")
    if len(tokens) < 9 or tokens[1] != "ACK":
        raise ValueError(f"not a delivery: {reply!r}")
    at = 2 if len(tokens) == 9 else 4
    stream, consumer, delivered, seq, consumer_seq, stamp, pending = tokens[at : at + 7]
    return DeliveryInfo(stream, consumer, int(delivered), int(seq), int(consumer_seq), int(stamp) / 1e9, int(pending))


class Received(Generic[T]):
    """One stored record. `message` decodes on first use; UnreadableMessage, MessageGone or CorruptPayload says why not.

    time: seconds since the epoch at which the stream stored it. deliveries: 1 for the first; 0 when it was read and
    not delivered by a durable consumer, in which case there is nothing to settle.
    """

    __slots__ = (
        "_connection",
        "_message",
        "_reply",
        "_trust",
        "_verified",
        "consumer",
        "data",
        "deliveries",
        "error",
        "headers",
        "seq",
        "settled",
        "stream",
        "subject",
        "time",
    )

    def __init__(
        self,
        *,
        subject: str,
        data: bytes | memoryview,
        headers: dict[str, str] | None,
        stream: str,
        seq: int,
        time: float,
        deliveries: int = 0,
        consumer: str = "",
        connection: "NatsConnection | None" = None,
        reply: str = "",
        trust: Trust,
    ) -> None:
        """trust: the keys of its writers."""
        self.subject, self.data, self.headers = subject, data, headers or _NO_HEADERS
        self.stream, self.seq, self.time = stream, seq, time
        self.deliveries, self.consumer = deliveries, consumer
        self.error: Exception | None = None
        """Why `message` cannot be given: set when its blob is gone or its type is unknown."""
        self.settled = False
        self._connection, self._reply = connection, reply
        self._trust, self._verified = trust, False
        self._message: T | None = None

    @property
    def message(self) -> T:
        """The decoded message."""
        if self._message is None:
            if self.error is not None:
                raise self.error
            try:
                self.verify()
                if self.stream == "HR_ADVISORY":
                    self._message = cast(T, _advisory(bytes(self.data)))
                else:
                    message = decode(self.data, self.headers)
                    reason = misplaced(self.subject, message)
                    if reason:
                        raise UnreadableMessage(reason)
                    self._message = cast(T, message)
            except UnreadableMessage as error:
                self.error = error
                raise
        return self._message

    def verify(self) -> None:
        """Check its writer's signature, of a claim check before its payload takes its place. Forged,
        UnreadableMessage."""
        if self._verified or self.stream == "HR_ADVISORY":
            return
        self._trust.check(self.subject, kind_of(self.headers, self.data), self.headers, self.data, self.time)
        self._verified = True

    @property
    def type(self) -> str:
        """Type name as the header says, without its version; empty when there is none."""
        return self.headers.get("Hr-Type", "").partition("/")[0]

    async def _settle(self, payload: bytes, *, sync: bool = False, final: bool = True) -> None:
        if self._connection is None or not self._reply or self.settled:
            return
        if sync:
            await self._connection.call(self._reply, payload)
        else:
            await self._connection.send(self._reply, payload)
        self.settled = self.settled or final

    async def ack(self) -> None:
        """Done. Fire and forget: a lost acknowledgement means a redelivery."""
        await self._settle(b"")

    async def ack_sync(self) -> None:
        """Done, confirmed by the broker: one more round trip, where a redelivery would be costly."""
        await self._settle(b"", sync=True)

    async def nak(self, delay: float = 0.0) -> None:
        """Deliver again after `delay` seconds."""
        await self._settle(b'-NAK {"delay": %d}' % int(delay * 1e9) if delay > 0 else b"-NAK")

    async def term(self, reason: str = "") -> None:
        """Do not deliver again: the broker publishes an advisory with the reason."""
        line = " ".join(reason.split())[:500]
        await self._settle(f"+TERM {line}".encode() if line else b"+TERM")

    async def in_progress(self) -> None:
        """Still in progress: restart the acknowledgement wait."""
        await self._settle(b"+WPI", final=False)


def _advisory(data: bytes) -> Advisory:
    """nats-server's JSON as a message."""
    try:
        raw: dict[str, Any] = json.loads(data)
        return Advisory(
            kind="terminated" if raw["type"].endswith(".terminated") else "max_deliver",
            stream=raw["stream"],
            consumer=raw["consumer"],
            stream_seq=int(raw["stream_seq"]),
            deliveries=int(raw["deliveries"]),
            reason=str(raw.get("reason", "")),
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UnreadableMessage(f"not a readable advisory: {error}") from error
