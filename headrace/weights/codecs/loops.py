"""The loops over elements that numpy would take several passes for, compiled by numba at their first call.

numba keeps the machine code in this module's __pycache__ or in the user's cache folder. Where neither can be written,
as in a unit of systemd with `ProtectSystem=strict`, every process compiles for about a second. A loop releases the
interpreter's lock, writes only into arrays that its caller made, and checks what a damaged frame could break; numba is
imported by the first call, so a process that codes no weights does not load it.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.weights.state import Bits

P = ParamSpec("P")
R = TypeVar("R")
Positions = NDArray[np.signedinteger]
"""int32 where a comparison made them, int64 where a frame did: its gaps may add up to anything."""
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

ESCAPE = 255
STRETCH, QUIET = 1024, 20
"""Words that are compared at once; fewer changed ones make a stretch quiet."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code, one version per combination of array types."""

    @functools.cache
    def machine_code() -> Callable[P, R]:
        import numba

        try:
            made: Callable[P, R] = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no folder that it can write
            made = numba.njit(nogil=True)(function)
        return made

    @functools.wraps(function)
    def call(*args: P.args, **names: P.kwargs) -> R:
        return machine_code()(*args, **names)

    return call


@compiled
def changes(
    base: Bits, target: Bits, olds: Words, news: Words, offset: int, at: Positions, old: Bits, new: Bits
) -> int:
    """Write position, counted from -offset, old and new bits of every element that differs; returns their number. olds,
    news: the same arrays in words of eight bytes, without the rest at the end. The last three arrays are as large as
    the first two.

    Nothing predicts which words and which of their elements differ, so both are collected without a branch. Where the
    stretch before held few changes, eight words at a time are compared first.
    """
    count, lanes, differ = 0, 8 // base.itemsize, 0
    words = np.empty(STRETCH, np.int64)
    for start in range(0, olds.size, STRETCH):
        end = min(start + STRETCH, olds.size)
        quiet, differ = differ < QUIET and end == start + STRETCH, 0
        if quiet:
            for line in range(start, end, 8):
                bits = olds[line] ^ news[line]
                for word in range(line + 1, line + 8):
                    bits |= olds[word] ^ news[word]
                if bits:
                    for word in range(line, line + 8):
                        words[differ] = word
                        differ += olds[word] != news[word]
        else:
            for word in range(start, end):
                words[differ] = word
                differ += olds[word] != news[word]
        for n in range(differ):
            for i in range(words[n] * lanes, (words[n] + 1) * lanes):
                at[count], old[count], new[count] = offset + i, base[i], target[i]
                count += base[i] != target[i]
    for i in range(olds.size * lanes, base.size):
        if base[i] != target[i]:
            at[count], old[count], new[count] = offset + i, base[i], target[i]
            count += 1
    return count


@compiled
def gaps(at: Positions, out: Bytes) -> int:
    """Write the gap bytes of ascending positions; returns their number, at most one a position and one for each 255
    elements."""
    end, before = 0, -1
    for position in at:
        gap = position - before - 1
        before = position
        while gap >= ESCAPE:
            out[end] = ESCAPE
            end += 1
            gap -= ESCAPE
        out[end] = gap
        end += 1
    return end


@compiled
def positions(gap_bytes: Bytes, out: Positions) -> int:
    """Write the positions of gap bytes, at most one a byte; returns their number."""
    count, at = 0, -1
    for gap in gap_bytes:
        if gap == ESCAPE:
            at += ESCAPE
        else:
            at += int(gap) + 1
            out[count] = at
            count += 1
    return count


@compiled
def add(base: Bits, at: Positions, zigzagged: Bits, target: Bits) -> None:
    """Write base plus zig-zag number, mod 2^w, at each of these positions, which must lie in both arrays."""
    for i in range(at.size):
        number = np.int64(zigzagged[i])
        target[at[i]] = np.int64(base[at[i]]) + ((number >> 1) ^ -(number & 1))


@compiled
def ranks(bits: Bits, shift: int, table: Bytes, at: Positions, out: Positions) -> None:
    """Write for each of these ascending positions the number of elements of its class before it. table: 256 classes, by
    the eight bits of an element above `shift`."""
    counts = np.zeros((4, 256), np.int64)  # neighbours often share a class, and a count must be stored to be read again
    i = 0
    for n in range(at.size):
        while i + 4 <= at[n]:
            counts[0, table[bits[i] >> shift & 255]] += 1
            counts[1, table[bits[i + 1] >> shift & 255]] += 1
            counts[2, table[bits[i + 2] >> shift & 255]] += 1
            counts[3, table[bits[i + 3] >> shift & 255]] += 1
            i += 4
        while i < at[n]:
            counts[0, table[bits[i] >> shift & 255]] += 1
            i += 1
        kind = table[bits[i] >> shift & 255]
        out[n] = counts[0, kind] + counts[1, kind] + counts[2, kind] + counts[3, kind]


@compiled
def members(bits: Bits, shift: int, table: Bytes, ends: Positions, rank: Positions, out: Positions) -> int:
    """Write the positions of members of classes; returns their number, fewer than all when a rank lies behind a class's
    last member. rank: ascending in each class; ends: of each class's ranks, the last class has none."""
    following = np.empty(256, np.int64)
    left = np.full(256, -1, np.int64)
    begin = 0
    for kind in range(ends.size):
        following[kind] = begin
        if begin < ends[kind]:
            left[kind] = rank[begin]
        begin = ends[kind]
    count = 0
    for i in range(bits.size):
        kind = table[bits[i] >> shift & 255]
        if left[kind] == 0:
            n = following[kind]
            out[n] = i
            count += 1
            following[kind] = n + 1
            left[kind] = rank[n + 1] - rank[n] if n + 1 < ends[kind] else 0
        left[kind] -= 1
    return count
