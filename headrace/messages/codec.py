"""Messages to bytes and back: msgpack, then lz4 where it pays.

Layout on the wire: the payload is msgpack, or an lz4 frame of it when ``Hr-Encoding: lz4`` says so; the type and its
version travel in ``Hr-Type: name/version``. Compression starts at 4 KiB and is kept only if it saves a tenth:
log-probabilities and routed experts hardly shrink, text does. Of a large payload samples are tried first, because
trying all of it costs more than anything else that is done to a megabyte.
"""

from collections.abc import Mapping
from typing import TypeVar

import lz4.frame
import msgspec

from headrace.messages.base import OLDER, TYPES, Message

TYPE_HEADER = "Hr-Type"
ENCODING_HEADER = "Hr-Encoding"
COMPRESS_FROM = 4096
"""Payloads below this many bytes are never compressed."""
SAMPLED_FROM = 128 << 10
SAMPLES, SAMPLE = 8, 4096
"""Pieces of a larger payload that are compressed first; it is left alone when together they save less than 5 %."""

T = TypeVar("T", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[msgspec.Struct]] = {}


class UnknownType(ValueError):
    """The payload's type is not one of ours, or it cannot be read as what it claims to be: a dead letter."""


def encode(message: Message) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of a message."""
    if not message.type_name:
        raise TypeError(f"{type(message).__name__} is not a registered message")
    payload = _encoder.encode(message)
    headers = {TYPE_HEADER: f"{message.type_name}/{message.type_version}"}
    if len(payload) >= COMPRESS_FROM and _may_shrink(payload):
        packed: bytes = lz4.frame.compress(payload, store_size=True)
        if len(packed) < 0.9 * len(payload):
            return packed, headers | {ENCODING_HEADER: "lz4"}
    return payload, headers


def _may_shrink(payload: bytes) -> bool:
    """Whether compressing is worth a try."""
    if len(payload) < SAMPLED_FROM:
        return True
    stride = (len(payload) - SAMPLE) // (SAMPLES - 1)
    pieces = b"".join(payload[at * stride : at * stride + SAMPLE] for at in range(SAMPLES))
    return len(lz4.frame.compress(pieces)) < 0.95 * len(pieces)


def decode(payload: bytes | memoryview, headers: Mapping[str, str] | None) -> Message:
    """Read any registered message by its headers. UnknownType says what was wrong with it."""
    kind = (headers or {}).get(TYPE_HEADER, "")
    name, _, version = kind.partition("/")
    cls = TYPES.get(name)
    if cls is None:
        raise UnknownType(f"unknown message type {kind!r}")
    if not version.isdigit() or int(version) > cls.type_version:
        raise UnknownType(f"{kind!r} is newer than this reader, which knows {name}/{cls.type_version}")
    known = OLDER.get((name, int(version)))
    if known is None:
        return decode_as(cls, payload, headers)
    was, upgrade = known
    return upgrade(_read(was, name, payload, headers))


def decode_as(cls: type[T], payload: bytes | memoryview, headers: Mapping[str, str] | None = None) -> T:
    """Read a payload as the given struct."""
    return _read(cls, cls.type_name, payload, headers)


def _read(cls: type[S], name: str, payload: bytes | memoryview, headers: Mapping[str, str] | None) -> S:
    encoding = (headers or {}).get(ENCODING_HEADER)
    if encoding not in (None, "lz4"):
        raise UnknownType(f"unknown encoding {encoding!r}")
    try:
        if encoding == "lz4":
            payload = bytes(lz4.frame.decompress(payload))
        decoder = _decoders.get(cls)
        if decoder is None:
            decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
        return decoder.decode(payload)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError, RuntimeError) as error:
        raise UnknownType(f"not a readable {name}: {error}") from error
