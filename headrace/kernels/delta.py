"""The changed elements of a tensor and their differences: the part of the lossless delta that reads every weight.

Idea: a trainer's weights are on a GPU, and one in a hundred changed. A comparison on the GPU leaves only positions and
differences to copy to the CPU, where `weights.codecs.ulp_delta` encodes them; a receiver's GPU adds them again.

First pass: each program reads its block of old and new bits once, keeps a bit for each changed element, ranks them by a
running sum, and writes position and difference of each to the block's own range of a scratch buffer. Work beyond the
comparison is done for changed elements alone. There are no atomics: the index of a change depends on its block and rank
alone, so every run gives the same bytes. A second, small pass copies the changes of all blocks into one list without
gaps.

Layout: bits as integers of 1, 2 or 4 bytes, flat. Positions int64, ascending; differences zig-zag in int32 (the low 8,
16 or 32 bits): (new - old) mod 2^w = 0, -1, +1, ... becomes 0, 1, 2, ... Applying adds mod 2^w; all positions differ,
so the order of the additions does not matter. A program copies its block of the base and then writes the changed
elements of that block, which are still in the cache; positions ascend, so a search gives each block's part of them.
Trade-off: four to six bytes of scratch per element, and a second pass over the changes.

The functions over numpy are the twins. The trainer keeps the versions that it scores again as these differences
(`training.served.versions`): `operators` calls the kernels for weights on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

WIDTHS: dict[torch.dtype, int] = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32}
"""Integer views of weights, and their bits."""
BLOCK, GROUP, LANES, WARPS = 4096, 16, 64, 4
"""Elements of a program that reads weights, blocks of one that collects changes and the changes of each at a time,
and warps of a program."""
PART, FEWER = 2048, 128
"""Elements of a program that applies changes, and changes that it adds at a time."""


def changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """old, new: flat integers of one dtype of `WIDTHS` -> positions int64 [k], zig-zag differences int32 [k]."""
    # In numpy: it finds few places in a quarter of torch's time, and its whole numbers wrap around.
    at = np.flatnonzero((old != new).numpy())
    difference = new.numpy().take(at) - old.numpy().take(at)
    signed = difference.view(f"i{difference.itemsize}")
    folded = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return torch.from_numpy(at), torch.from_numpy(folded.view(f"u{folded.itemsize}").astype(np.int32))


def apply(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    """A copy of `base` (flat integers of `WIDTHS`) with `folded` zig-zag differences added at positions `at`."""
    out = base.clone()
    bits, places, number = out.numpy(), at.numpy(), folded.numpy().view(np.uint32)
    bits[places] += ((number >> 1) ^ np.negative(number & 1)).astype(bits.dtype)  # cut to the low bits
    return out


@jit
def _bits(x):  # type: ignore[no-untyped-def]
    """The number of ones in each byte, int32."""
    pairs = x - ((x >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 15


@jit
def _record_kernel(  # type: ignore[no-untyped-def]
    old, new, places, numbers, counts, n, SPARE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block's changes at the front of its range of `places` and `numbers`, and their number in `counts`."""
    block = tl.program_id(0)
    # Rows of eight elements, which one thread loads: the bits of a row need no exchange between threads.
    row, lane = tl.arange(0, BLOCK // 8), tl.arange(0, 8)
    begin = block.to(tl.int64) * BLOCK
    at = row[:, None] * 8 + lane[None, :]
    live = begin + at < n
    a = tl.load(old + begin + at, mask=live, other=0)
    b = tl.load(new + begin + at, mask=live, other=0)
    left = tl.sum((a != b).to(tl.int32) << lane[None, :], 1)
    count = _bits(left)
    rank = tl.cumsum(count, 0) - count
    tl.store(counts + block, tl.sum(count, 0))
    # Of each row the first change, the second and so on; the elements are still in the cache.
    for number in range(0, tl.max(count, 0)):
        mine = left != 0
        lowest = left & -left
        # The exponent of a power of two as float32 is the place of its bit.
        place = row * 8 + ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)
        x = tl.load(old + begin + place, mask=mine, other=0).to(tl.int32)
        y = tl.load(new + begin + place, mask=mine, other=0).to(tl.int32)
        difference = ((y - x) << SPARE) >> SPARE
        folded = (difference << 1) ^ (difference >> 31)
        tl.store(places + begin + rank + number, place.to(tl.int16), mask=mine)
        tl.store(numbers + begin + rank + number, folded.to(numbers.dtype.element_ty), mask=mine)
        left = left ^ lowest


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    places, numbers, counts, starts, at, folded, blocks,
    MASK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Copies the changes of GROUP blocks behind those of the blocks before each of them."""
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    count = tl.load(counts + block, mask=block < blocks, other=0)
    start = tl.load(starts + block, mask=block < blocks, other=0)[:, None]
    begin = (block.to(tl.int64) * BLOCK)[:, None]
    for first in range(0, tl.max(count, 0), LANES):
        lane = (first + tl.arange(0, LANES))[None, :]
        mine = lane < count[:, None]
        place = tl.load(places + begin + lane, mask=mine, other=0).to(tl.int64)
        number = tl.load(numbers + begin + lane, mask=mine, other=0).to(tl.int32)
        tl.store(at + start + lane, place + begin, mask=mine)
        tl.store(folded + start + lane, number & MASK, mask=mine)


@jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    base, out, at, folded, bounds, n, BLOCK: tl.constexpr, FEWER: tl.constexpr,
):  # fmt: skip
    """Copies a block of the base and then writes its changed elements; bounds int64: the block's first change and, one
    further, that of the next. The store cuts the sum to the width of the weights."""
    block = tl.program_id(0)
    lane = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(base + lane, mask=lane < n, other=0), mask=lane < n)
    tl.debug_barrier()  # the copy is written before another thread writes a changed element
    end = tl.load(bounds + block + 1)
    for first in range(tl.load(bounds + block), end, FEWER):
        near = first + tl.arange(0, FEWER)
        live = near < end
        where = tl.load(at + near, mask=live, other=0)
        number = tl.load(folded + near, mask=live, other=0)
        # The upper half of a zig-zag number of 32 bits is negative as int32: shift in zeros.
        difference = ((number >> 1) & 0x7FFFFFFF) ^ -(number & 1)
        value = tl.load(base + where, mask=live, other=0)
        tl.store(out + where, (value.to(tl.int32) + difference).to(value.dtype), mask=live)


def changes_triton(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """`changes` on the device of its inputs. It needs four bytes of scratch per element, six for 32 bits: pass a large
    tensor in parts."""
    width = WIDTHS[old.dtype]
    blocks = dispatch.tiles(old.numel(), BLOCK)
    places = torch.empty(blocks * BLOCK, dtype=torch.int16, device=old.device)
    numbers = torch.empty(blocks * BLOCK, dtype=torch.int32 if width == 32 else torch.int16, device=old.device)
    counts = torch.zeros(blocks, dtype=torch.int32, device=old.device)
    if not blocks:
        return counts.long(), counts
    _record_kernel[(blocks,)](
        old, new, places, numbers, counts, old.numel(), SPARE=32 - width, BLOCK=BLOCK, num_warps=WARPS
    )
    ends = counts.cumsum(0)
    at = torch.empty(int(ends[-1]), dtype=torch.int64, device=old.device)
    folded = torch.empty(len(at), dtype=torch.int32, device=old.device)
    _gather_kernel[(dispatch.tiles(blocks, GROUP),)](
        places, numbers, counts, ends - counts, at, folded, blocks, MASK=-1 if width == 32 else (1 << width) - 1,
        BLOCK=BLOCK, GROUP=GROUP, LANES=LANES, num_warps=WARPS,
    )  # fmt: skip
    return at, folded


def apply_triton(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    """`apply` on the device of its inputs. `at` ascends, as `changes` gives it: a block finds its own part of it."""
    out = torch.empty_like(base)
    blocks = dispatch.tiles(base.numel(), PART)
    if blocks:
        bounds = torch.searchsorted(at, torch.arange(blocks + 1, device=at.device) * PART)
        _apply_kernel[(blocks,)](base, out, at, folded, bounds, base.numel(), BLOCK=PART, FEWER=FEWER, num_warps=WARPS)
    return out
