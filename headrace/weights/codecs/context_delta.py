"""D10: the context delta, for slow links. As `ulp_delta`, but positions and values are coded per class of exponents.

The idea: a step of one size moves a small weight by many units in the last place and a large one rarely by one, so the
chance of a change is about |step| / ULP(w): it doubles with every exponent downwards. The receiver has the old weights,
so it knows the exponents. Elements are divided into classes of similar exponents. Within a class changes are spread
almost evenly, so their gaps, counted in elements of that class alone, need close to their entropy. Values are coded per
class too: with high exponents nearly all are one unit, with low exponents many are larger.

Why ranks by bit counts: the rank of an element within its class is the number of class members before it. A class as a
bit vector (packbits), its words' bit counts and their running sum give the rank of any position, and back, without a
loop in Python and without sorting: numpy needs one pass of compare, pack and count per class.

Layout of the streams: bounds (two bytes per class: lowest and highest exponent), then per class gaps and values as in
`ulp_delta`, then the exceptions of all classes.

Trade-off: a pass per class takes most of the speed of `ulp_delta`; the gain is a quarter to a third of the bytes.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.weights.codecs import ulp_delta
from headrace.weights.codecs.streams import Bytes, Stream, pack, unpack
from headrace.weights.codecs.ulp_delta import ESCAPE, Positions
from headrace.weights.state import Bits, WeightError

EXPONENTS: dict[str, tuple[int, int]] = {
    "BF16": (7, 0xFF),
    "F16": (10, 0x1F),
    "F32": (23, 0xFF),
    "F8_E4M3": (3, 0x0F),
    "F8_E5M2": (2, 0x1F),
}
"""dtype to (shift, mask) of its exponent field. Other dtypes have no exponent and are not coded this way."""
MOST_CLASSES = 24
LEAST_CHANGES = 160
"""A class with fewer changes costs more in tables than it saves."""

_SELECT = np.zeros((256, 8), np.uint8)
for _byte in range(256):
    _SELECT[_byte, : _byte.bit_count()] = [bit for bit in range(8) if _byte >> bit & 1]


def exponents(bits: Bits, dtype: str) -> Bytes:
    """Exponent fields, uint8, one per element of the flat `bits`."""
    shift, mask = EXPONENTS[dtype]
    out = (bits >> shift).astype(np.uint8)
    if mask != 0xFF:
        out &= np.uint8(mask)
    return out


class _Members:
    """The members of a class as a bit vector with ranks."""

    def __init__(self, fields: Bytes, low: int, high: int):
        inside = np.subtract(fields, np.uint8(low)) <= high - low
        packed = np.packbits(inside, bitorder="little")
        self.words: NDArray[np.uint64] = np.zeros(-(-packed.size // 8), np.uint64)
        self.words.view(np.uint8)[: packed.size] = packed
        self.ends = np.cumsum(np.bitwise_count(self.words), dtype=np.int64)
        """Number of members up to and including each word."""

    def rank(self, at: Positions) -> Positions:
        """The number of members before each of these members."""
        words = self.words[at >> 6]
        below = words & ((np.uint64(1) << (at & 63).astype(np.uint64)) - np.uint64(1))
        ranks: Positions = self.ends[at >> 6] - np.bitwise_count(words) + np.bitwise_count(below)
        return ranks

    def select(self, ranks: Positions) -> Positions:
        """The positions of the members of these ranks, ascending. WeightError when the class has fewer members."""
        if ranks.size and (not self.ends.size or ranks[-1] >= self.ends[-1]):
            raise WeightError("a gap points behind the last member of its class: the frame is damaged")
        at = np.searchsorted(self.ends, ranks, side="right")
        words = self.words[at]
        left = (ranks - self.ends[at] + np.bitwise_count(words)).astype(np.uint8)
        bytes_ = words.view(np.uint8).reshape(-1, 8)
        upto = np.cumsum(np.bitwise_count(bytes_), axis=1, dtype=np.uint8)
        which = (upto <= left[:, None]).sum(axis=1)
        rows = np.arange(at.size)
        byte = bytes_[rows, which]
        left -= upto[rows, which] - np.bitwise_count(byte)
        selected: Positions = (at << 6) + (which << 3) + _SELECT[byte, left]
        return selected


def classes(changed: Bytes) -> list[tuple[int, int]]:
    """Ranges of exponents (lowest, highest), ascending, each with enough changes to pay for its tables. changed: the
    exponents of the changed elements."""
    counts = np.bincount(changed, minlength=256)
    least = max(LEAST_CHANGES, changed.size // MOST_CLASSES)
    out: list[tuple[int, int]] = []
    low, held = -1, 0
    for exponent in np.flatnonzero(counts).tolist():
        low = exponent if held == 0 else low
        held += int(counts[exponent])
        if held >= least:
            out.append((low, exponent))
            held = 0
    if held:
        out.append((out.pop()[0] if out else low, int(np.flatnonzero(counts)[-1])))
    return out


def encode(fields: Bytes, at: Positions, zigzagged: Bits) -> tuple[Stream, ...]:
    """Streams of the changes at positions `at` of a unit whose old exponents are `fields`."""
    changed = fields[at]
    bounds = classes(changed)
    streams, wide = [], []
    for low, high in bounds:
        mine = np.flatnonzero((changed >= low) & (changed <= high))
        numbers = zigzagged[mine]
        streams.append(pack(ulp_delta.gaps_of(_Members(fields, low, high).rank(at[mine]))))
        streams.append(pack(ulp_delta.small(numbers)))
        wide.append(numbers[numbers >= ESCAPE] if zigzagged.itemsize > 1 else numbers[:0])
    table = pack(np.array(bounds, np.uint8))
    return (table, *streams, pack(ulp_delta.planes(np.concatenate(wide))))


def decode(
    fields: Bytes, streams: tuple[Stream, ...], items: int, kind: np.dtype[np.unsignedinteger]
) -> tuple[Positions, Bits]:
    """Positions and zig-zag numbers of `items` changes, class by class. WeightError when the streams do not fit."""
    bounds = unpack(streams[0], 2 * 256).reshape(-1, 2) if streams[0].size % 2 == 0 else np.empty((0, 2), np.uint8)
    if len(streams) != 2 + 2 * len(bounds):
        raise WeightError(f"{len(streams)} streams for {len(bounds)} classes")
    places, values = [], []
    for (low, high), gaps, numbers in zip(bounds.tolist(), streams[1:-1:2], streams[2:-1:2], strict=True):
        if low > high:
            raise WeightError(f"a class of exponents {low} to {high}")
        value = unpack(numbers, items)
        ranks = ulp_delta.positions_of(unpack(gaps, value.size + fields.size // ESCAPE + 1))
        if ranks.size != value.size:
            raise WeightError(f"{ranks.size} gaps for {value.size} values")
        places.append(_Members(fields, low, high).select(ranks))
        values.append(value)
    small = np.concatenate(values) if values else np.empty(0, np.uint8)
    if small.size != items:
        raise WeightError(f"{small.size} values for {items} changes")
    return np.concatenate(places), ulp_delta.widen(small, streams[-1], kind)
