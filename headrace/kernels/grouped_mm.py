"""Products of many experts in one launch: forward, dgrad and wgrad.

Idea: the rows of an expert are contiguous, as `expert_mlp.plan` lays them out; `ends` says where each expert's rows
end. The reduction in ascending tiles, no split (`tile`): a row's bits do not depend on its group's size. Sums are
float32.

    forward  y[t] = x[t] @ w[e].T         x [T, K], w [E, N, K] -> [T, N]
    dgrad    d[t] = g[t] @ w[e]           g [T, N], w [E, N, K] -> [T, K]
    wgrad    v[e] = sum_t g[t] x[t].T     g [T, N], x [T, K]    -> [E, N, K]

Operands of MXFP8 and NVFP4 arrive as numbers of the policy's dtype on the format's grid (`operators.formats`): the
model holds widened weights, so nothing is widened here. On Blackwell `block_scaled.product` multiplies quantised
operands by the tensor cores' block-scaled instruction, in ordinary mode and with many rows.

Trade-off: Hopper's tensor cores have no block-scaled rate: there the formats save published bytes, not operations.

Error against float64: K 2^-24 of the sum of magnitudes, and one rounding of the result's dtype. On a CPU `expert_mlp`
multiplies expert by expert. `operators` calls these functions for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch, tile
from headrace.kernels.dispatch import jit, tl
from headrace.kernels.tile import Shape


class Mx(NamedTuple):
    """A quantised operand: float8_e4m3fn [..., K] and scales uint8 [..., K / 32]."""

    q: Tensor
    scale: Tensor


class Nv(NamedTuple):
    """A quantised operand: uint8 [..., K / 2], scales float8_e4m3fn [..., K / 16] and float32 [...]; see `nvfp4`."""

    q: Tensor
    scale: Tensor
    outer: Tensor


Ends = Sequence[int] | Tensor
"""The end row of each expert. As int64 [E] on the device the host does not wait for it; it then consists of multiples
of `TILE`."""
TILE = 64
"""Smallest number of rows of a tile, to a multiple of which the rows of an expert are padded."""


@jit
def _part(x, rows, first, width, rows_live, cols_live, C: tl.constexpr, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [R, C] of an operand [., width] from column `first` on; zeros outside of rows_live [R] and cols_live [C],
    which are not used where FULL."""
    cols = first + tl.arange(0, C)
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    if FULL:
        out = tl.load(x + at)
    else:
        out = tl.load(x + at, mask=rows_live[:, None] & cols_live[None, :], other=0.0)
    return out


@jit
def _bounds(tiles, number):  # type: ignore[no-untyped-def]
    """(expert, first row, end row) of a tile, as `tiles_of` lists them."""
    return tl.load(tiles + number * 3), tl.load(tiles + number * 3 + 1), tl.load(tiles + number * 3 + 2)


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, w, out, tiles, high, n, k, BACK: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Forward, or dgrad (BACK): one tile of rows of one expert; tiles int32 [high, 3]: expert, first row, end row.

    EVEN: the operands' sides are multiples of the tile's. Rows beyond the last are others, loaded and not stored.
    """
    wide = k if BACK else n
    deep = n if BACK else k
    down, across = tile.banded(tl.program_id(0), high, tl.cdiv(wide, BN), BAND)
    expert, first, end = _bounds(tiles, down)
    if first >= end:
        return
    rows, cols = first + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    near = tl.minimum(rows, end - 1)
    always = tl.full((BM,), 1, dtype=tl.int1)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, deep, BK):
        along = start + tl.arange(0, BK)
        inside = along < deep
        a = _part(x, near, start, deep, always, inside, BK, EVEN)
        if BACK:
            b = _part(w, expert * n + along, across * BN, k, inside, cols < wide, BN, EVEN)
        else:
            b = _part(w, expert * n + cols, start, k, cols < wide, inside, BK, EVEN)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        total = tl.dot(a, b if BACK else tl.trans(b), total, input_precision="ieee")
    place = out + rows.to(tl.int64)[:, None] * wide + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (cols < wide)[None, :])


@jit
def _wgrad_kernel(  # type: ignore[no-untyped-def]
    g, x, out, ends, n, k, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """One tile [BN, BK] of one expert's gradient: a walk over its rows, ascending."""
    down, across = tile.banded(tl.program_id(0), tl.cdiv(n, BN), tl.cdiv(k, BK), 8)
    expert = tl.program_id(1)
    first, end = tl.load(ends + expert), tl.load(ends + expert + 1)
    ns, ks = down * BN + tl.arange(0, BN), across * BK + tl.arange(0, BK)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for start in range(first, end, BM):
        rows = start + tl.arange(0, BM)
        live = rows < end
        a = tl.load(g + rows.to(tl.int64)[None, :] * n + (ns % n)[:, None], mask=live[None, :], other=0.0)
        b = _part(x, rows, across * BK, k, live, ks < k, BK, False)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + (expert.to(tl.int64) * n + ns)[:, None] * k + ks[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(ns < n)[:, None] & (ks < k)[None, :])


@jit
def _tiles_kernel(ends, tiles, high, experts, BE: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK tiles int32 [high, 3] of BM rows, from the end row of each expert; tiles beyond the last have no row."""
    lane = tl.arange(0, BE)
    end = tl.load(ends + lane, mask=lane < experts, other=0).to(tl.int32)
    begin = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < experts), other=0).to(tl.int32)
    count = tl.where(lane < experts, (end - begin + BM - 1) // BM, 0)
    last = tl.cumsum(count, 0)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (number[:, None] < last[None, :]) & (number[:, None] >= (last - count)[None, :])
    expert = tl.sum(tl.where(mine, lane[None, :], 0), 1)
    first = tl.sum(tl.where(mine, begin[None, :] + (number[:, None] - (last - count)[None, :]) * BM, 0), 1)
    place = tiles + number * 3
    tl.store(place, expert, mask=number < high)
    tl.store(place + 1, first, mask=number < high)
    tl.store(place + 2, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=number < high)


FEW, MANY = Shape(64, 128, 128, 4, 3), Shape(128, 256, 64, 8, 3)
"""For few rows per expert, and for many."""
GRADIENT = Shape(64, 128, 256, 8, 3)
"""Rows of a step, and [rows, columns] of a tile of a weight's gradient."""
SINGLE = Shape(64, 64, 32, 4, 2)
"""For float32, which the tensor cores do not multiply."""
MANY_ROWS = 128
"""Rows of an expert, on average, from which large tiles are used."""


def tiles_of(ends: Ends, rows: int, height: int, device: torch.device) -> Tensor:
    """int32 [., 3]: expert, first row, end row of each tile of `height` rows.

    The host does not wait for the ends: there are as many tiles as there may be, and those beyond the last have no row.
    """
    on_device = ends if isinstance(ends, Tensor) else torch.tensor(ends, dtype=torch.int64, device=device)
    high = rows // height + len(ends)
    tiles = torch.empty(high, 3, dtype=torch.int32, device=device)
    block = dispatch.power_of_two(len(ends))
    _tiles_kernel[(dispatch.tiles(high, 32),)](on_device, tiles, high, len(ends), BE=block, BM=height, BLOCK=32)
    return tiles


def _launch(x: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype, back: bool) -> Tensor:
    x, w = x.contiguous(), w.contiguous()
    n, k = w.shape[1], w.shape[2]
    wide, deep = (k, n) if back else (n, k)
    single = torch.float32 in (x.dtype, w.dtype)
    shape = SINGLE if single else MANY if len(x) >= MANY_ROWS * len(ends) else FEW
    tiles = tiles_of(ends, len(x), shape.rows, x.device)
    out = torch.empty(len(x), wide, dtype=dtype, device=x.device)
    if len(x):
        _rows_kernel[(len(tiles) * dispatch.tiles(wide, shape.columns),)](
            x, w, out, tiles, len(tiles), n, k, BACK=back,
            EVEN=deep % shape.depth == 0 and wide % shape.columns == 0, WIDE=dispatch.INTERPRETED or single,
            BM=shape.rows, BN=shape.columns, BK=shape.depth, BAND=8, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return out


def grouped_mm_triton(x: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Forward: x [T, K], w [E, N, K] -> [T, N] in `dtype`."""
    return _launch(x, w, ends, dtype, False)


def grouped_dgrad_triton(g: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of x: g [T, N], w [E, N, K] -> [T, K] in `dtype`."""
    return _launch(g, w, ends, dtype, True)


def grouped_wgrad_triton(g: Tensor, x: Tensor, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of w: g [T, N], x [T, K] -> [E, N, K] in `dtype`; zeros where an expert has no rows."""
    g, x = g.contiguous(), x.contiguous()
    n, k = g.shape[1], x.shape[1]
    out = torch.empty(len(ends), n, k, dtype=dtype, device=g.device)
    if isinstance(ends, Tensor):
        bounds = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    else:
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=g.device)
    single = torch.float32 in (g.dtype, x.dtype)
    shape = SINGLE if single else GRADIENT
    _wgrad_kernel[(dispatch.tiles(n, shape.columns) * dispatch.tiles(k, shape.depth), len(ends))](
        g, x, out, bounds, n, k, WIDE=dispatch.INTERPRETED or single, BM=shape.rows, BN=shape.columns,
        BK=shape.depth, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
