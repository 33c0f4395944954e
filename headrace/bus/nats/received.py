"""A message that came from a stream (or was read from one), and how to settle it."""

import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from headrace.messages.base import Message
from headrace.messages.codec import UnknownType, decode
from headrace.messages.operations import Advisory

if TYPE_CHECKING:
    from headrace.bus.link import Link

T = TypeVar("T", bound=Message)

_NO_HEADERS: dict[str, str] = {}


class Delivery(msgspec.Struct, frozen=True):
    """What the acknowledgement subject of a delivery says."""

    stream: str
    consumer: str
    deliveries: int
    seq: int
    consumer_seq: int
    time: float
    pending: int


def parse_reply(reply: str) -> Delivery:
    """``$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>``, or the form with a domain."""
    tokens = reply.split(".")
    if len(tokens) < 9 or tokens[1] != "ACK":
        raise ValueError(f"not a delivery: {reply!r}")
    at = 2 if len(tokens) == 9 else 4
    stream, consumer, delivered, seq, consumer_seq, stamp, pending = tokens[at : at + 7]
    return Delivery(stream, consumer, int(delivered), int(seq), int(consumer_seq), int(stamp) / 1e9, int(pending))


class Received(Generic[T]):
    """One stored message. `message` decodes on first use and raises what is wrong with it: UnknownType, MessageGone.

    time: seconds since the epoch at which the stream stored it. deliveries: 1 for the first; 0 when it was read and
    not delivered by a durable consumer, in which case there is nothing to settle.
    """

    __slots__ = (
        "_link",
        "_message",
        "_reply",
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
        link: "Link | None" = None,
        reply: str = "",
    ) -> None:
        self.subject, self.data, self.headers = subject, data, headers or _NO_HEADERS
        self.stream, self.seq, self.time = stream, seq, time
        self.deliveries, self.consumer = deliveries, consumer
        self.error: Exception | None = None
        """Why `message` cannot be given: set when its blob is gone or its type is unknown."""
        self.settled = False
        self._link, self._reply = link, reply
        self._message: T | None = None

    @property
    def message(self) -> T:
        """The decoded message."""
        if self._message is None:
            if self.error is not None:
                raise self.error
            try:
                if self.stream == "HR_ADVISORY":
                    self._message = cast(T, _advisory(bytes(self.data)))
                else:
                    self._message = cast(T, decode(self.data, self.headers))
            except UnknownType as error:
                self.error = error
                raise
        return self._message

    @property
    def type(self) -> str:
        """Type name as the header says, without its version; empty when there is none."""
        return self.headers.get("Hr-Type", "").partition("/")[0]

    async def _settle(self, payload: bytes, *, sync: bool = False, final: bool = True) -> None:
        if self._link is None or not self._reply or self.settled:
            return
        if sync:
            await self._link.call(self._reply, payload)
        else:
            await self._link.send(self._reply, payload)
        self.settled = self.settled or final

    async def ack(self) -> None:
        """Done. Fire and forget: a lost acknowledgement means a redelivery."""
        await self._settle(b"")

    async def ack_sync(self) -> None:
        """Done, confirmed by the broker: one more round trip, where a redelivery would be costly."""
        await self._settle(b"", sync=True)

    async def nak(self, delay: float = 0.0) -> None:
        """Not now: deliver again after `delay` seconds."""
        await self._settle(b'-NAK {"delay": %d}' % int(delay * 1e9) if delay > 0 else b"-NAK")

    async def term(self, reason: str = "") -> None:
        """Never again: the broker tells everyone who listens to its advisories, with the reason."""
        line = " ".join(reason.split())[:500]
        await self._settle(f"+TERM {line}".encode() if line else b"+TERM")

    async def in_progress(self) -> None:
        """Still at it: restart the acknowledgement wait."""
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownType(f"not a readable advisory: {error}") from error
