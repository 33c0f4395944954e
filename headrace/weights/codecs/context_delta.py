"""D10: the context delta, for slow links. As `ulp_delta`, but positions and values are coded per class of exponents.

The idea: a step of one size moves a small weight by many units in the last place and a large one rarely by one, so the
chance of a change is about |step| / ULP(w): it doubles with every exponent downwards. The receiver has the old weights,
so it knows the exponents. Elements are divided into classes of similar exponents. Within a class changes are spread
almost evenly, so their gaps, counted in elements of that class alone, need close to their entropy. Values are coded per
class too: with high exponents nearly all are one unit, with low exponents many are larger.

The rank of an element within its class is the number of class members before it: one pass counts all classes.

Layout of the streams: bounds (two bytes per class: lowest and highest exponent), then per class gaps and values as in
`ulp_delta`, then the exceptions of all classes.

Trade-off: the pass over all elements takes half of the speed of `ulp_delta`; the gain is a quarter to a third of the
bytes.
"""

from collections.abc import Sequence

import numpy as np

from headrace.weights.codecs import loops, ulp_delta
from headrace.weights.codecs.loops import ESCAPE, Positions
from headrace.weights.codecs.streams import Bytes, Stream, pack, unpack
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


def exponents(bits: Bits, dtype: str) -> Bytes:
    """Exponent fields, uint8, one per element of the flat `bits`."""
    shift, mask = EXPONENTS[dtype]
    out = (bits >> shift).astype(np.uint8)
    if mask != 0xFF:
        out &= np.uint8(mask)
    return out


def _table(bounds: Sequence[Sequence[int]], dtype: str) -> Bytes:
    """Eight bits above the shift to class, ascending; the number of classes for an exponent that has none."""
    table = np.full(256, len(bounds), np.uint8)
    for kind, (low, high) in enumerate(bounds):
        table[low : high + 1] = kind
    by_bits: Bytes = table[np.arange(256) & EXPONENTS[dtype][1]]
    return by_bits


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


def encode(bits: Bits, dtype: str, at: Positions, zigzagged: Bits) -> tuple[Stream, ...]:
    """Streams of the changes at positions `at` of a unit whose old bits are `bits`."""
    changed = exponents(bits[at], dtype)
    bounds = classes(changed)
    table, ranks = _table(bounds, dtype), np.empty(at.size, np.int64)
    loops.ranks(bits, EXPONENTS[dtype][0], table, at, ranks)
    kinds = table[changed]
    streams, wide = [], []
    for kind in range(len(bounds)):
        mine = np.flatnonzero(kinds == kind)
        numbers = zigzagged[mine]
        streams.append(pack(ulp_delta.gaps_of(ranks[mine])))
        streams.append(pack(ulp_delta.small(numbers)))
        wide.append(numbers[numbers >= ESCAPE] if zigzagged.itemsize > 1 else numbers[:0])
    return (pack(np.array(bounds, np.uint8)), *streams, pack(ulp_delta.planes(np.concatenate(wide))))


def decode(bits: Bits, dtype: str, streams: tuple[Stream, ...], items: int) -> tuple[Positions, Bits]:
    """Positions and zig-zag numbers of `items` changes of a unit with these old bits, class by class. WeightError when
    the streams do not fit."""
    bounds = (
        unpack(streams[0], 2 * MOST_CLASSES).reshape(-1, 2) if streams[0].size % 2 == 0 else np.empty((0, 2), np.uint8)
    )
    if len(streams) != 2 + 2 * len(bounds):
        raise WeightError(f"{len(streams)} streams for {len(bounds)} classes")
    if any(low > high for low, high in bounds) or (bounds[1:, 0] <= bounds[:-1, 1]).any():
        raise WeightError(f"classes of exponents {bounds.tolist()}, which do not ascend")
    ranks, values = [], []
    for gaps, numbers in zip(streams[1:-1:2], streams[2:-1:2], strict=True):
        values.append(unpack(numbers, items))
        ranks.append(ulp_delta.positions_of(unpack(gaps, values[-1].size + bits.size // ESCAPE + 1)))
        if ranks[-1].size != values[-1].size:
            raise WeightError(f"{ranks[-1].size} gaps for {values[-1].size} values")
    if sum(value.size for value in values) != items:
        raise WeightError(f"{sum(value.size for value in values)} values for {items} changes")
    at, ends = np.empty(items, np.int64), np.cumsum([value.size for value in values])
    table = _table(bounds.tolist(), dtype)
    if loops.members(bits, EXPONENTS[dtype][0], table, ends, np.concatenate(ranks), at) != items:
        raise WeightError("a gap points behind the last member of its class: the frame is damaged")
    return at, ulp_delta.widen(np.concatenate(values), streams[-1], bits.dtype)
