"""Frames between host and guest: one JSON header and raw bodies, so that file contents are never escaped.

Layout: u32 length of the rest, u32 length of the header, the header (JSON, UTF-8), then the bodies, concatenated; the
header's field ``#`` lists their lengths. Big-endian. Both sides use this file.

The first message to a clone is not a frame but START: a mark that no frame can begin with, the time, and entropy in the
kernel's format. The emulator translates code when it first runs, and JSON was a third of the first answer's cost.
"""

import json
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

_LENGTHS = struct.Struct("!II")
# The C scanner and encoder, without the wrappers of json.loads and json.dumps: those (regular expressions, an encoder
# per call) cost more than the work, and under emulation their first use costs milliseconds in every clone.
_scan: Any = json.scanner.make_scanner(json.JSONDecoder())  # type: ignore[attr-defined]
_SHAPE = (None, ":", ",", False, False, False)  # indent, separators, sort keys, skip keys, allow NaN
_encode: Any = json.encoder.c_make_encoder(None, None, json.encoder.encode_basestring_ascii, *_SHAPE)  # type: ignore[attr-defined]
_PIECE = 256 << 10
LIMIT = 80 << 20
"""Largest frame that a side accepts, in bytes."""
START = b"hr:start"
"""Read as a frame's length it is 1.7 GiB, which exceeds LIMIT."""
_START = struct.Struct("<8sqii32s")
START_SIZE = _START.size


class Garbage(ValueError):
    """The received bytes are not frames: the other side is broken or hostile."""


class FileBody:
    """A body that is read from a regular file while it is sent: always `len` bytes, whatever becomes of the file."""

    def __init__(self, path: str, hold: bool = False) -> None:
        """The file as long as it is now; nothing where it cannot be read. hold: keep it open for the first `pieces`."""
        self._path = path
        self._fd = _open(path)
        self.readable = self._fd >= 0
        """Whether it is a regular file that can be read."""
        self._size = os.fstat(self._fd).st_size if self.readable else 0
        if self.readable and not hold:
            os.close(self._fd)
            self._fd = -1

    def __len__(self) -> int:
        return self._size

    def pieces(self) -> Iterator[bytes]:
        """The content in pieces, with zeros in place of what was cut off meanwhile."""
        left = self._size
        fd, self._fd = self._fd, -1
        if fd < 0 and left:
            fd = _open(self._path)
        try:
            while left:
                piece = b""
                if fd >= 0:
                    with suppress(OSError):
                        piece = os.read(fd, min(left, _PIECE))
                piece = piece or bytes(min(left, _PIECE))
                left -= len(piece)
                yield piece
        finally:
            if fd >= 0:
                os.close(fd)


Body = bytes | FileBody


def _open(path: str) -> int:
    """A descriptor of a regular file, opened without waiting for anything; -1 for what is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def pack(header: dict[str, Any], bodies: Sequence[bytes] = ()) -> bytes:
    """One frame."""
    return b"".join(parts(header, bodies))


def parts(header: dict[str, Any], bodies: Sequence[bytes] = ()) -> list[bytes]:
    """One frame in pieces, none of them copied."""
    return [_head(header, bodies), *bodies]


def send(fd: int, header: dict[str, Any], bodies: Sequence[Body] = ()) -> None:
    """Write one frame to a descriptor that blocks. OSError."""
    head = _head(header, bodies)
    if any(isinstance(body, FileBody) for body in bodies):
        _write(fd, head)
        for body in bodies:
            for piece in (body,) if isinstance(body, bytes) else body.pieces():
                _write(fd, piece)
    else:
        _write(fd, b"".join((head, *(body for body in bodies if isinstance(body, bytes)))))


def _head(header: dict[str, Any], bodies: Sequence[Body]) -> bytes:
    text = "".join(_encode(header | {"#": [len(body) for body in bodies]}, 0)).encode()
    return _LENGTHS.pack(4 + len(text) + sum(map(len, bodies)), len(text)) + text


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def start(nanoseconds: int, entropy: bytes) -> bytes:
    """START with nanoseconds since the epoch, and 32 random bytes or none."""
    return _START.pack(START, nanoseconds, 8 * len(entropy), len(entropy), entropy)


STARTED = pack({"i": 0})
"""The answer to START, in the form of an answer to call 0."""


class Reader:
    """Splits a stream of bytes into frames of at most `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._buffer = bytearray()
        self._limit = limit

    @property
    def pending(self) -> int:
        """Bytes received that are not yet part of a returned frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], list[bytes]]]:
        """The frames that are complete with this data. Garbage when the stream does not consist of frames."""
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
                with memoryview(buffer) as view:
                    for length in lengths:
                        if length < 0 or at + length > 4 + size:
                            raise ValueError("a body leaves its frame")
                        bodies.append(bytes(view[at : at + length]))
                        at += length
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StopIteration) as error:
                raise Garbage(f"an unreadable frame: {error}") from None
            del buffer[: 4 + size]
            frames.append((header, bodies))
        return frames
