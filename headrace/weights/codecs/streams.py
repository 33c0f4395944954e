"""One compressed byte stream of a frame, and how to open one from an untrusted source.

zstd level 1 is the default: its Huffman stage takes a third off gaps and differences that have no repeats to match,
and it runs on a hundredth of the weights, so its speed hardly counts. lz4 has no entropy stage and is there for links
that are faster than the cores. A stream that does not shrink is stored as it is.
"""

import threading

import lz4.block
import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.weights.state import WeightError

RAW, ZSTD, LZ4 = 0, 1, 2
METHODS = {"zstd": ZSTD, "lz4": LZ4}

Bytes = NDArray[np.uint8]


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """`data` decompresses to `size` bytes; kind 0 stored, 1 zstd, 2 lz4 block."""

    kind: int
    size: int
    data: bytes


class _Contexts(threading.local):
    """zstd contexts may not be shared between threads and are expensive to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(array: np.ndarray, method: int) -> Stream:
    """A stream of an array's bytes, compressed by `method` when that is smaller."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    if method == ZSTD and raw.size:
        data = _contexts.compressor.compress(raw.data)
    elif method == LZ4 and raw.size:
        data = lz4.block.compress(raw.data, store_size=False)
    else:
        return Stream(RAW, raw.size, raw.tobytes())
    return Stream(method, raw.size, data) if len(data) < raw.size else Stream(RAW, raw.size, raw.tobytes())


def unpack(stream: Stream, limit: int) -> Bytes:
    """The bytes of a stream. WeightError when it is damaged or claims more than `limit` bytes."""
    if not 0 <= stream.size <= limit:
        raise WeightError(f"a stream claims {stream.size} bytes where at most {limit} can be")
    if stream.kind == RAW:
        data = stream.data
    elif stream.kind == ZSTD:
        try:
            # The frame's own size is what the library allocates: check it before, not after.
            if zstandard.frame_content_size(stream.data) != stream.size:
                raise WeightError("a zstd stream is not of the size that its frame says")
            data = _contexts.decompressor.decompress(stream.data)
        except zstandard.ZstdError as error:
            raise WeightError(f"a zstd stream does not open: {error}") from None
    elif stream.kind == LZ4:
        try:
            data = lz4.block.decompress(stream.data, uncompressed_size=stream.size)
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
            raise WeightError(f"an lz4 stream does not open: {error}") from None
    else:
        raise WeightError(f"a stream is of unknown kind {stream.kind}")
    if len(data) != stream.size:
        raise WeightError(f"a stream opened to {len(data)} bytes where {stream.size} were promised")
    return np.frombuffer(data, np.uint8)
