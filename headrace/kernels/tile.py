"""Parts that the kernels of matrix products share: the order of the programs, and the walk along the reduction.

Idea: every product adds its terms in ascending tiles of the reduction, into float32 sums that stay in registers, by the
tensor core's instruction for 64 rows. The rows and columns of a tile then change no bit of an element: each instruction
adds the same 16 terms to the same sum, whatever the tile's shape is. So few rows get small tiles, many rows large ones.
No document guarantees this; `policy.numerics_probe` and `python -m benchmarks.kernels` compare bits on the GPU itself.

Layout: programs are numbered in bands of row tiles. Within a band the row tile changes first, so that programs which
run together share columns of the second operand, and the band's rows stay in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.kernels.dispatch import HOPPER, Chip, jit, tl


class Shape(NamedTuple):
    """A tile's rows, columns and depth, and the warps and pipeline stages of a program.

    The shapes in the kernels' files are the fastest of those that were timed on an H100.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def on(self, chip: Chip) -> Shape:
        """The shape with as many stages, at most its own, as fit the chip's shared memory with operands of 16 bits.

        Stages are copies of a step's operands; their number changes no bit. Chips without the tensor cores' own loads
        from shared memory, which are those with less of it, hold one copy in registers.
        """
        step = 2 * (self.rows + self.columns) * self.depth
        spare = int(chip.shared_bytes < HOPPER.shared_bytes)
        return self._replace(stages=min(self.stages, chip.shared_bytes // step + spare))


@jit
def banded(program, high, wide, BAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tile, column tile) of a program among high x wide tiles."""
    band = program // (BAND * wide)
    first = band * BAND
    size = tl.minimum(high - first, BAND)
    within = program - band * BAND * wide
    return first + within % size, within // size


@jit
def walk(a, b, total, depth, BK: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """total [BM, BN] plus rows of a times rows of b, in ascending tiles of BK.

    a [BM, 1] and b [1, BN] point to the first element of each row; EVEN: depth is a multiple of BK.
    """
    near = tl.arange(0, BK)
    for start in range(0, depth, BK):
        at = start + near
        if EVEN:
            x, w = tl.load(a + at[None, :]), tl.load(b + at[:, None])
        else:
            inside = at < depth
            x = tl.load(a + at[None, :], mask=inside[None, :], other=0.0)
            w = tl.load(b + at[:, None], mask=inside[:, None], other=0.0)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total
