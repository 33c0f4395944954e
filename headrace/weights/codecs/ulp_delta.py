"""The ULP delta: positions of changed elements as gaps in bytes, changes as one byte of units in the last place.

The idea: at the learning rates of reinforcement learning one weight in a hundred changes per step, nine in ten of
those by one unit in the last place (ULP). So a change costs two small symbols: the gap to the one before, and the
difference of the two bit patterns as unsigned numbers modulo 2^w, zig-zag folded so that +-1 become 2 and 1. Bit
patterns are treated as integers, so the code is exact for every pattern: NaN payloads, minus zero, a changed sign,
denormals. An entropy coder (zstd's Huffman stage) then brings a change to about nine bits in bf16.

Why the escape 255 and not a wider type: gaps have a geometric distribution, and one long gap would widen all gaps of a
tensor (as in PULSE, slime and arc_v3). Gap 255 * q + r is q bytes of 255 and then r < 255.

Layout of the streams: gaps (u1, escapes included), values (u1, one per change; 255 says "see exceptions" unless the
weights are themselves bytes), exceptions (byte planes of the zig-zag numbers that do not fit, low plane first).

Trade-off: gaps do not use that small weights change more often, which the exponents show; using it saves another third
of the size at half of the speed, in a codec of its own (`context_delta`).
"""

from collections.abc import Sequence

import numpy as np

from headrace.weights.codecs import loops
from headrace.weights.codecs.loops import ESCAPE, Positions
from headrace.weights.codecs.streams import Bytes, Stream, pack, unpack
from headrace.weights.state import Bits, WeightError


def changes(base: Sequence[Bits], target: Sequence[Bits]) -> tuple[Positions, Bits, Bits]:
    """Positions that differ, ascending, with the old and the new bits there. base, target: blocks of the same lengths;
    positions count through them."""
    size = sum(block.size for block in base)
    at, old, new = np.empty(size, np.int32), np.empty(size, base[0].dtype), np.empty(size, base[0].dtype)
    offset = count = 0
    for before, after in zip(base, target, strict=True):
        whole = before.nbytes // 8 * 8 // before.itemsize
        words = before[:whole].view(np.uint64), after[:whole].view(np.uint64)
        count += loops.changes(before, after, *words, offset, at[count:], old[count:], new[count:])
        offset += before.size
    return at[:count], old[:count], new[:count]  # the pages behind the last change were never touched


def zigzag_difference(old: Bits, new: Bits) -> Bits:
    """Zig-zag of (new - old) mod 2^w: 0, -1, +1, -2 ... become 0, 1, 2, 3 ..."""
    return zigzag(new - old)


def zigzag(differences: Bits) -> Bits:
    """Zig-zag numbers of differences mod 2^w."""
    signed = differences.view(f"<i{differences.itemsize}")
    zigzagged: Bits = ((signed << 1) ^ (signed >> (differences.itemsize * 8 - 1))).view(differences.dtype)
    return zigzagged


def unzigzag(zigzagged: Bits) -> Bits:
    """Differences mod 2^w of zig-zag numbers: the inverse of `zigzag`."""
    out: Bits = (zigzagged >> 1) ^ np.negative(zigzagged & 1)
    return out


def gaps_of(at: Positions) -> Bytes:
    """Ascending positions as gap bytes: numbers of unchanged elements before each change, with escapes."""
    most = at.size + int(at[-1]) // ESCAPE if at.size else 0
    out = np.empty(most, np.uint8)
    return out[: loops.gaps(at, out)]


def positions_of(gaps: Bytes) -> Positions:
    """Ascending positions of gap bytes: the inverse of `gaps_of`."""
    out = np.empty(gaps.size, np.int64)
    return out[: loops.positions(gaps, out)]


def small(zigzagged: Bits) -> Bytes:
    """Zig-zag numbers as one byte each; 255 marks an exception, except where the weights are bytes themselves."""
    if zigzagged.itemsize == 1:
        return zigzagged.astype(np.uint8, copy=False)
    out = zigzagged.astype(np.uint8)
    out[zigzagged >= ESCAPE] = ESCAPE
    return out


def pack_values(zigzagged: Bits) -> tuple[Stream, Stream]:
    """The streams of values and of exceptions of zig-zag numbers."""
    wide = zigzagged[zigzagged >= ESCAPE] if zigzagged.itemsize > 1 else zigzagged[:0]
    return pack(small(zigzagged)), pack(planes(wide))


def unpack_values(values: Stream, exceptions: Stream, items: int, kind: np.dtype[np.unsignedinteger]) -> Bits:
    """`items` zig-zag numbers. WeightError when the streams do not hold exactly that many."""
    small_numbers = unpack(values, items)
    if small_numbers.size != items:
        raise WeightError(f"a frame has {small_numbers.size} values, expected one for each of {items} changes")
    return widen(small_numbers, exceptions, kind)


def widen(numbers: Bytes, exceptions: Stream, kind: np.dtype[np.unsignedinteger]) -> Bits:
    """Zig-zag numbers, in dtype `kind`, from their bytes and from the exceptions in the same order."""
    if kind.itemsize == 1:
        return numbers
    zigzagged = numbers.astype(kind)
    wide = np.flatnonzero(numbers == ESCAPE)
    rest = unplanes(unpack(exceptions, wide.size * kind.itemsize), kind)
    if rest.size != wide.size:
        raise WeightError(f"{rest.size} exceptions for {wide.size} escapes")
    zigzagged[wide] = rest
    return zigzagged


def planes(array: Bits) -> Bytes:
    """Byte planes of an array, lowest byte first: all first bytes, then all second bytes, and so on."""
    if array.itemsize == 1:
        return array.astype(np.uint8, copy=False)
    return np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.itemsize).T).reshape(-1)


def unplanes(data: Bytes, kind: np.dtype[np.unsignedinteger]) -> Bits:
    """The array of these byte planes: the inverse of `planes`. WeightError when the planes are incomplete."""
    if data.size % kind.itemsize:
        raise WeightError(f"{data.size} bytes are not a multiple of the element size {kind.itemsize}")
    out: Bits = np.ascontiguousarray(data.reshape(kind.itemsize, -1).T).reshape(-1).view(kind)
    return out
