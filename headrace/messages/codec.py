"""Messages to bytes and back: msgpack, then lz4 where it saves a tenth.

Layout on the wire: the payload is msgpack, or an lz4 frame of it when ``Hr-Encoding: lz4`` says so; the type and its
version travel in ``Hr-Type: name/version``. Compression starts at 4 KiB and is kept only if it saves a tenth:
text shrinks, log-probabilities and routed experts hardly do. Samples of a large payload are compressed first, because a
useless compression of all of it would be the most expensive part of sending it.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

import lz4.frame
import msgspec

from headrace.errors import HeadraceError
from headrace.messages.base import OLDER, TYPES, Message

TYPE_HEADER = "Hr-Type"
ENCODING_HEADER = "Hr-Encoding"
COMPRESS_FROM = 4096
"""Payloads below this many bytes are never compressed."""
SAMPLED_FROM = 128 << 10
MAX_DECODED = 512 << 20
"""Bytes of a decompressed payload above which a message is refused: a compressed one of 8 MiB could claim 2 GiB."""
SAMPLES, SAMPLE = 8, 4096
"""Pieces of a larger payload that are compressed first; it is left alone when together they save less than 5 %."""

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
T = TypeVar("T", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[msgspec.Struct]] = {}


class UnreadableMessage(HeadraceError, ValueError):
    """This reader cannot use the message: its type is unknown or newer, its content is damaged or oversized, or it does
    not belong on its subject. A work queue's consumer makes it a dead letter, other readers skip it."""


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
    """Whether samples of the payload shrink enough to compress all of it."""
    if len(payload) < SAMPLED_FROM:
        return True
    stride = (len(payload) - SAMPLE) // (SAMPLES - 1)
    pieces = b"".join(payload[at * stride : at * stride + SAMPLE] for at in range(SAMPLES))
    return len(lz4.frame.compress(pieces)) < 0.95 * len(pieces)


def decode(payload: bytes | memoryview, headers: Mapping[str, str] | None) -> Message:
    """Read any registered message by its headers. UnreadableMessage says what is wrong with it."""
    kind = (headers or {}).get(TYPE_HEADER, "")
    name, _, version = kind.partition("/")
    cls = TYPES.get(name)
    if cls is None:
        raise UnreadableMessage(f"unknown message type {kind[:80]!r}")
    if not _VERSION.fullmatch(version):
        raise UnreadableMessage(f"expected {name}/<version>, got {kind[:80]!r}")
    if int(version) > cls.type_version:
        raise UnreadableMessage(f"{kind!r} is newer than this reader, which reads up to {name}/{cls.type_version}")
    older = OLDER.get((name, int(version)))
    if older is None:
        return decode_as(cls, payload, headers)
    struct, upgrade = older
    content = _read(struct, name, payload, headers)
    try:
        return upgrade(content)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UnreadableMessage(f"{kind} cannot be upgraded: {type(error).__name__}: {error}") from error


def plain(payload: bytes | memoryview, headers: Mapping[str, str] | None) -> bytes:
    """The content of a payload without its compression. UnreadableMessage."""
    if (headers or {}).get(ENCODING_HEADER) != "lz4":
        return bytes(payload)
    try:
        return _decompress(payload)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UnreadableMessage(f"not a readable payload: {error}") from error


def decode_as(cls: type[T], payload: bytes | memoryview, headers: Mapping[str, str] | None = None) -> T:
    """Read a payload as the given struct."""
    return _read(cls, cls.type_name, payload, headers)


def _read(cls: type[S], name: str, payload: bytes | memoryview, headers: Mapping[str, str] | None) -> S:
    encoding = (headers or {}).get(ENCODING_HEADER)
    if encoding not in (None, "lz4"):
        raise UnreadableMessage(f"unknown encoding {encoding[:80]!r}: expected lz4 or none")
    try:
        if encoding == "lz4":
            payload = _decompress(payload)
        decoder = _decoders.get(cls)
        if decoder is None:
            decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
        return decoder.decode(payload)  # type: ignore[return-value]
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:  # RecursionError is a RuntimeError
        raise UnreadableMessage(f"not a readable {name}: {error}") from error


def _decompress(payload: bytes | memoryview) -> bytes:
    """The content of one lz4 frame, at most `MAX_DECODED` bytes of it. ValueError, RuntimeError."""
    decompressor = lz4.frame.LZ4FrameDecompressor()
    content: bytes = decompressor.decompress(payload, max_length=MAX_DECODED)
    if not decompressor.eof:
        oversized = len(content) >= MAX_DECODED
        raise ValueError(f"over {MAX_DECODED >> 20} MiB decompressed" if oversized else "the lz4 frame is cut off")
    return content
