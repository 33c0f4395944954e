"""The compressed byte streams of a frame, which are decompressed safely from an untrusted source.

zstd level 1 is the default: its Huffman stage saves a third of gaps and differences, which have no repeats to match. It
runs on a hundredth of the weights, so its speed matters little. A stream that does not shrink is stored uncompressed.
"""

import threading

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.weights.state import WeightError

RAW, ZSTD = 0, 1

Bytes = NDArray[np.uint8]


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """`data` decompresses to `size` bytes; kind 0 stored, 1 zstd."""

    kind: int
    size: int
    data: bytes


class _Contexts(threading.local):
    """zstd contexts per thread: threads may not share them, and they are expensive to create."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(array: np.ndarray) -> Stream:
    """A stream of an array's bytes, compressed when that is smaller."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    if raw.size and len(data := _contexts.compressor.compress(raw.data)) < raw.size:
        return Stream(ZSTD, raw.size, data)
    return Stream(RAW, raw.size, raw.tobytes())


def unpack(stream: Stream, limit: int) -> Bytes:
    """The bytes of a stream. WeightError when it is damaged or claims more than `limit` bytes."""
    if not 0 <= stream.size <= limit:
        raise WeightError(f"a stream claims {stream.size} bytes, expected at most {limit}")
    if stream.kind == RAW:
        data = stream.data
    elif stream.kind == ZSTD:
        try:
            # The library allocates the size that the frame states: check it before decompression.
            if zstandard.frame_content_size(stream.data) != stream.size:
                raise WeightError(f"a zstd stream states another size than the {stream.size} bytes of its frame")
            data = _contexts.decompressor.decompress(stream.data)
        except zstandard.ZstdError as error:
            raise WeightError(f"a zstd stream cannot be decompressed: {error}") from None
    else:
        raise WeightError(f"a stream has kind {stream.kind}, expected {RAW} or {ZSTD}")
    if len(data) != stream.size:
        raise WeightError(f"a stream has {len(data)} bytes after decompression, expected {stream.size}")
    return np.frombuffer(data, np.uint8)
