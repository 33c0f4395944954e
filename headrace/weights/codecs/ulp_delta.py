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

import numpy as np
from numpy.typing import NDArray

from headrace.weights.codecs.streams import Bytes, Stream, pack, unpack
from headrace.weights.state import Bits, WeightError

Positions = NDArray[np.int64]
ESCAPE = 255


def changes(base: Bits, target: Bits) -> tuple[Positions, Bits, Bits]:
    """Positions that differ, ascending, with the old and the new bits there. Both arrays must have the same length.

    Eight bytes are compared at a time first: at one change in a hundred, 96 of a hundred words are equal.
    With more than one changed word in three this is slower (measured), and elements are compared one by one.
    """
    shift = 3 - base.itemsize.bit_length() + 1
    lanes = 1 << shift
    whole = base.size >> shift << shift
    if whole and not (base.ctypes.data | target.ctypes.data) % 8:
        olds, news = base[:whole].view(np.uint64), target[:whole].view(np.uint64)
        words = np.flatnonzero(olds != news)
        if words.size * 3 < olds.size:
            old, new = olds[words].view(base.dtype), news[words].view(base.dtype)
            hits = np.flatnonzero(old != new)
            at, old, new = (words[hits >> shift] << shift) + (hits & (lanes - 1)), old[hits], new[hits]
            if whole == base.size:
                return at, old, new
            tail = np.flatnonzero(base[whole:] != target[whole:]) + whole
            return np.r_[at, tail], np.r_[old, base[tail]], np.r_[new, target[tail]]
    at = np.flatnonzero(base != target)
    return at, base[at], target[at]


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
    if not at.size:
        return np.empty(0, np.uint8)
    gaps = np.empty(at.size, np.int64)
    gaps[0] = at[0]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= 1
    rest = gaps.astype(np.uint8)
    long = np.flatnonzero(gaps >= ESCAPE)
    if not long.size:
        return rest
    escapes, rest[long] = np.divmod(gaps[long], ESCAPE)
    ends = np.arange(at.size)
    ends[long[0] :] += np.repeat(np.cumsum(escapes), np.diff(long, append=at.size))
    out = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    out[ends] = rest
    return out


def positions_of(gaps: Bytes) -> Positions:
    """Ascending positions of gap bytes: the inverse of `gaps_of`."""
    ends = gaps != ESCAPE
    at = np.cumsum(gaps + ends, dtype=np.int64)
    at -= 1
    return at if ends.all() else at[ends]


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
