"""The changed elements of a tensor and their differences: the part of the lossless delta that reads every weight.

Idea: a trainer's weights are on a GPU, and one in a hundred changed. A comparison on the GPU leaves only positions and
differences to copy to the CPU, where `weights.codecs.ulp_delta` encodes them; a receiver's GPU adds them again.

First pass: each program reads its block of old and new bits once, ranks its changes by a running sum and writes their
positions and differences to the block's own range of a scratch buffer. There are no atomics: the index of a change
depends on its block and rank alone, so every run gives the same bytes. A second, small pass copies the changes of all
blocks into one list without gaps.

Layout: bits as integers of 1, 2 or 4 bytes, flat. Positions int64, ascending; differences zig-zag in int32 (the low
8, 16 or 32 bits): (new - old) mod 2^w = 0, -1, +1, ... becomes 0, 1, 2, ... Applying adds mod 2^w; all positions
differ, so the order of the additions does not matter. Trade-off: six bytes of scratch per element, and a second pass
over the changes.

The torch functions are the twins. Nothing but tests and benchmarks calls the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

WIDTHS: dict[torch.dtype, int] = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32}
"""Integer views of weights, and their bits."""
BLOCK, FEWER = 2048, 256
"""Elements of a program: of one that reads weights, and of one that adds differences."""


def changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """old, new: flat integers of one dtype of `WIDTHS` -> positions int64 [k], zig-zag differences int32 [k]."""
    at = (old != new).nonzero().reshape(-1)
    return at, zigzag(old[at], new[at])


def zigzag(old: Tensor, new: Tensor) -> Tensor:
    """The zig-zag number of (new - old) mod 2^w, int32."""
    spare = 32 - WIDTHS[old.dtype]
    # In int64, and cut to 32 bits: a difference of two int32 may need 33.
    difference = _low((new.long() - old.long()) << spare, 32) >> spare
    return _low((difference << 1) ^ (difference >> 31), WIDTHS[old.dtype], signed=spare == 0).int()


def _low(number: Tensor, bits: int, *, signed: bool = True) -> Tensor:
    """The low bits of int64 numbers, as a signed number of that width or an unsigned one."""
    low = number & ((1 << bits) - 1)
    return torch.where(low >> (bits - 1) != 0, low - (1 << bits), low) if signed else low


def apply(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    """A copy of `base` (flat integers of `WIDTHS`) with `folded` zig-zag differences added at positions `at`."""
    width = WIDTHS[base.dtype]
    number = folded.long() & ((1 << width) - 1)
    difference = (number >> 1) ^ -(number & 1)
    out = base.clone()
    out[at] = _low(base[at].long() + difference, width, signed=base.dtype != torch.uint8).to(base.dtype)
    return out


@jit
def _changes_kernel(  # type: ignore[no-untyped-def]
    old, new, places, numbers, counts, n, SPARE: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's changes at the front of its range of `places` and `numbers`, and their number in `counts`."""
    block = tl.program_id(0)
    # Rows of eight elements, which one thread loads: ranks within a row need no exchange between threads.
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    begin = block.to(tl.int64) * BLOCK
    live = begin + lane < n
    a = tl.load(old + begin + lane, mask=live, other=0).to(tl.int32)
    b = tl.load(new + begin + lane, mask=live, other=0).to(tl.int32)
    hit = a != b
    ones = hit.to(tl.int32)
    row = tl.sum(ones, 1)
    rank = (tl.cumsum(row, 0) - row)[:, None] + tl.cumsum(ones, 1) - ones
    difference = ((b - a) << SPARE) >> SPARE
    folded = ((difference << 1) ^ (difference >> 31)) & MASK
    tl.store(places + begin + rank, lane.to(tl.int16), mask=hit)
    tl.store(numbers + begin + rank, folded, mask=hit)
    tl.store(counts + block, tl.sum(row, 0))


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    places, numbers, counts, starts, at, folded, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a block's changes behind those of the blocks before it."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    start = tl.load(starts + block)
    begin = block.to(tl.int64) * BLOCK
    for first in range(0, count, 64):
        lane = first + tl.arange(0, 64)
        mine = lane < count
        place = tl.load(places + begin + lane, mask=mine, other=0).to(tl.int64)
        number = tl.load(numbers + begin + lane, mask=mine, other=0)
        tl.store(at + start + lane, place + begin, mask=mine)
        tl.store(folded + start + lane, number, mask=mine)


@jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    out, at, folded, n, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a block of differences at their positions; the store cuts the sum to the width of the weights."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < n
    where = tl.load(at + lane, mask=live, other=0)
    number = tl.load(folded + lane, mask=live, other=0)
    # The upper half of a zig-zag number of 32 bits is negative as int32: shift in zeros.
    difference = ((number >> 1) & 0x7FFFFFFF) ^ -(number & 1)
    value = tl.load(out + where, mask=live, other=0)
    tl.store(out + where, (value.to(tl.int32) + difference).to(value.dtype), mask=live)


def changes_triton(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """`changes` on the device of its inputs. It needs six bytes of scratch per element: pass a large tensor in
    parts."""
    size, width = old.numel(), WIDTHS[old.dtype]
    blocks = dispatch.tiles(size, BLOCK)
    places = torch.empty(blocks * BLOCK, dtype=torch.int16, device=old.device)
    numbers = torch.empty(blocks * BLOCK, dtype=torch.int32, device=old.device)
    counts = torch.zeros(blocks, dtype=torch.int32, device=old.device)
    mask = -1 if width == 32 else (1 << width) - 1
    if blocks:
        _launch(_changes_kernel, blocks, old, new, places, numbers, counts, size, SPARE=32 - width, MASK=mask)
    ends = counts.long().cumsum(0)
    changed = int(ends[-1]) if blocks else 0
    at = torch.empty(changed, dtype=torch.int64, device=old.device)
    folded = torch.empty(changed, dtype=torch.int32, device=old.device)
    if changed:
        _launch(_gather_kernel, blocks, places, numbers, counts, ends - counts, at, folded, warps=1)
    return at, folded


def apply_triton(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    """`apply` on the device of its inputs."""
    out = base.clone()
    if at.numel():
        _apply_kernel[(dispatch.tiles(at.numel(), FEWER),)](out, at, folded, at.numel(), BLOCK=FEWER, num_warps=4)
    return out


def _launch(kernel: Any, blocks: int, *operands: Any, warps: int = 4, **constants: int) -> None:
    kernel[(blocks,)](*operands, **constants, BLOCK=BLOCK, num_warps=warps)
