"""Frames between host and guest: one JSON header and raw bodies, so that file contents are never escaped.

Layout: u32 length of what follows, u32 length of the header, the header (JSON, UTF-8), then the bodies end to end;
their lengths stand in the header under ``#``. Big-endian. Both sides use this file.

A clone's first words are no frame but START: a mark that no frame can begin with, the time, and entropy as the kernel
takes it. An emulator translates whatever runs for the first time, and reading and writing JSON was a third of that.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

_LENGTHS = struct.Struct("!II")
# The C scanner and encoder themselves: what json.loads and json.dumps wrap around them (regular expressions, an encoder
# made per call) is more than the work itself, and under emulation its first use costs milliseconds in every clone.
_scan: Any = json.scanner.make_scanner(json.JSONDecoder())  # type: ignore[attr-defined]
_SHAPE = (None, ":", ",", False, False, False)  # indent, separators, sort keys, skip keys, allow NaN
_encode: Any = json.encoder.c_make_encoder(None, None, json.encoder.encode_basestring_ascii, *_SHAPE)  # type: ignore[attr-defined]
LIMIT = 80 << 20
"""Largest frame that either side accepts, in bytes."""
START = b"hr:start"
"""As a frame's length 1.7 GiB: beyond LIMIT."""
_START = struct.Struct("<8sqii32s")
START_SIZE = _START.size


class Garbage(ValueError):
    """The bytes on the wire are not frames: the other side is broken or hostile."""


def pack(header: dict[str, Any], bodies: Sequence[bytes] = ()) -> bytes:
    """One frame."""
    text = "".join(_encode(header | {"#": [len(body) for body in bodies]}, 0)).encode()
    return b"".join((_LENGTHS.pack(4 + len(text) + sum(map(len, bodies)), len(text)), text, *bodies))


def start(nanoseconds: int, entropy: bytes) -> bytes:
    """START with the time since the epoch, and 32 random bytes or none."""
    return _START.pack(START, nanoseconds, 8 * len(entropy), len(entropy), entropy)


STARTED = pack({"i": 0})
"""The answer: that of call 0."""


class Reader:
    """Turns a stream of bytes into frames. `limit` bounds what one frame may hold."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._buffer = bytearray()
        self._limit = limit

    @property
    def pending(self) -> int:
        """Bytes received and not yet given out."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], list[bytes]]]:
        """All frames that are complete now. Garbage when the stream can't be one of frames."""
        self._buffer += data
        frames = []
        buffer = self._buffer
        while len(buffer) >= 8:
            size, text = _LENGTHS.unpack_from(buffer)
            if size > self._limit or text + 4 > size:
                raise Garbage(f"a frame of {size} bytes with a header of {text}")
            if len(buffer) < 4 + size:
                break
            try:
                header, end = _scan(buffer[8 : 8 + text].decode(), 0)
                if end != text:
                    raise ValueError("more than one value")
                lengths = header.pop("#")
                at, bodies = 8 + text, []
                for length in lengths:
                    if length < 0 or at + length > 4 + size:
                        raise ValueError("a body leaves its frame")
                    bodies.append(bytes(buffer[at : at + length]))
                    at += length
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StopIteration) as error:
                raise Garbage(f"a frame that can't be read: {error}") from None
            del buffer[: 4 + size]
            frames.append((header, bodies))
        return frames
