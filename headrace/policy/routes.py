"""Routes of a mixture on the wire: the gaps between a token's sorted experts, through zstd's Huffman stage.

The experts of a token and layer are a set: 8 of 128 hold 40.3 bits, which their list of bytes spends 64 on. Gaps of a
sorted list need 42 after zstd. Routes that are not sorted are stored as they are: the embedded engine's order of
experts is the order of its sums, which a replay repeats.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from headrace.messages.base import Array
from headrace.messages.codec import MAX_DECODED
from headrace.messages.rollout import PackedRoutes, Turn

EIGHT = 8
"""Experts of a token whose bytes are one number: the differences of all are then one product."""
SAVES = 0.8
"""Largest share of the bytes for which routes are packed."""
BLOCK = 1 << 15
"""Rows that are sorted at a time: they stay in the processor's cache."""


@cache
def comparators(count: int) -> tuple[tuple[int, int], ...]:
    """A network that sorts `count` numbers (Batcher's merge exchange; Knuth, volume 3, algorithm 5.2.2M)."""

    def pairs() -> Iterator[tuple[int, int]]:
        top = 1 << max(0, (count - 1).bit_length() - 1)
        p = top
        while p:
            q, r, d = top, 0, p
            while True:
                yield from ((i, i + d) for i in range(count - d) if i & p == r)
                if q == p:
                    break
                d, q, r = q - p, q >> 1, p
            p >>= 1

    return tuple(pairs()) if count > 1 else ()


def ascending(experts: Any) -> Any:
    """Routes [..., k] of numpy with each token's experts in ascending order."""
    import numpy as np

    rows = experts.reshape(-1, experts.shape[-1])
    out = np.empty_like(rows)
    for start in range(0, len(rows), BLOCK):
        columns = np.ascontiguousarray(rows[start : start + BLOCK].T)
        less = np.empty_like(columns[0])
        for low, high in comparators(rows.shape[1]):
            np.minimum(columns[low], columns[high], out=less)
            np.maximum(columns[low], columns[high], out=columns[high])
            columns[low] = less
        out[start : start + BLOCK] = columns.T
    return out.reshape(experts.shape)


def pack(routes: Array) -> PackedRoutes | None:
    """Routes [positions, layers, k] in fewer bytes; None where that saves less than a fifth, as of unsorted ones."""
    import numpy as np
    import zstandard

    if routes.dtype not in ("|u1", "<u2") or not routes.data:
        return None
    k = routes.shape[-1]
    if routes.dtype == "|u1" and k == EIGHT:  # a token's list is a number, and this takes each byte from the next one
        gaps = np.frombuffer(routes.data, "<u8") * np.uint64((1 - (1 << 8)) % (1 << 64))
    else:
        flat = np.frombuffer(routes.data, routes.dtype)
        gaps = flat.copy()
        gaps[1:] -= flat[:-1]
        gaps[::k] = flat[::k]
    packed = zstandard.ZstdCompressor(level=1).compress(gaps.data)
    if len(packed) > SAVES * len(routes.data):
        return None
    positions, layers, _ = routes.shape
    return PackedRoutes("|u1" if routes.dtype == "|u1" else "<u2", (positions, layers, k), packed)


def unpack(packed: PackedRoutes) -> Array:
    """The routes. ValueError when `pack` did not make the bytes."""
    import numpy as np
    import zstandard

    k, size = packed.shape[-1], math.prod(packed.shape) * (1 if packed.dtype == "|u1" else 2)
    try:
        if zstandard.frame_content_size(packed.data) != size or size > MAX_DECODED:
            raise ValueError(f"packed routes of another size than {list(packed.shape)}")
        gaps = zstandard.ZstdDecompressor().decompress(packed.data)
    except zstandard.ZstdError as error:
        raise ValueError(f"packed routes cannot be read: {error}") from None
    if packed.dtype == "|u1" and k == EIGHT:
        return Array(packed.dtype, packed.shape, (np.frombuffer(gaps, "<u8") * np.uint64(0x0101010101010101)).tobytes())
    rows = np.frombuffer(bytearray(gaps), packed.dtype).reshape(-1, k)
    for at in range(1, k):
        rows[:, at] += rows[:, at - 1]
    return Array(packed.dtype, packed.shape, rows.tobytes())


def on_wire(turn: Turn) -> Turn:
    """A turn as it is stored."""
    if turn.routed is None or (packed := pack(turn.routed)) is None:
        return turn
    return msgspec.structs.replace(turn, routed=None, packed=packed)


def in_memory(turn: Turn) -> Turn:
    """A stored turn with its routes. ValueError as in `unpack`."""
    if turn.packed is UNSET:
        return turn
    return msgspec.structs.replace(turn, routed=unpack(turn.packed), packed=UNSET)


def without(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Turns without their routes, which are in the turn log."""
    return tuple(msgspec.structs.replace(turn, routed=None, packed=UNSET) for turn in turns)


def filled(turns: Sequence[Turn], logged: Iterable[Turn]) -> tuple[Turn, ...]:
    """Turns with the routes of the turn log."""
    routes = {turn.index: in_memory(turn).routed for turn in logged}
    return tuple(msgspec.structs.replace(turn, routed=routes.get(turn.index)) for turn in turns)
