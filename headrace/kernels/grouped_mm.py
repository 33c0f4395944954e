"""Products of many experts in one launch: forward, dgrad and wgrad, operands plain, in MXFP8 or in NVFP4.

Idea: the rows of an expert are contiguous, as `expert_mlp.plan` lays them out; `ends` says where each expert's rows
end. The reduction in ascending tiles, no split (`tile`): a row's bits do not depend on its group's size. An MXFP8
operand comes as its bytes and scales along the last dimension and is widened exactly; the sums are float32. With few
rows per expert it is widened in registers, so that memory is read once at half the bytes, and the product is computed
transposed: Hopper's tensor cores read their left operand from registers, so that widened weights need not be written to
shared memory. With many rows it is widened before the product and to bfloat16, so that the tensor cores do not wait for
it.

    forward  y[t] = x[t] @ w[e].T         x [T, K], w [E, N, K] -> [T, N]
    dgrad    d[t] = g[t] @ w[e]           g [T, N], w [E, N, K] -> [T, K]
    wgrad    v[e] = sum_t g[t] x[t].T     g [T, N], x [T, K]    -> [E, N, K]

The table in `mxfp8` lists the quantised operands: weights and activations are quantised, gradients are not.

On Blackwell `block_scaled.product` multiplies quantised operands by the tensor cores' block-scaled instruction, in
ordinary mode and with many rows.

Trade-off: Hopper's tensor cores stay at their bfloat16 rate: there MXFP8 saves bytes (few rows per expert), not
operations. NVFP4 operands are widened before every other product; with few rows they save no bytes yet.

Error against float64 of the widened operands: K 2^-24 of the sum of magnitudes, and one rounding of the result's dtype.
`operators` calls the Triton side for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch, mxfp8, tile
from headrace.kernels.block_scaled import nvfp4
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


Operand = Tensor | Mx | Nv
Ends = Sequence[int] | Tensor
"""The end row of each expert. As int64 [E] on the device the host does not wait for it; it then consists of multiples
of `TILE`."""
TILE = 64
"""Smallest number of rows of a tile, to a multiple of which the rows of an expert are padded."""


def widened(x: Operand, dtype: torch.dtype) -> Tensor:
    """An operand as numbers."""
    if isinstance(x, Nv):
        return nvfp4.dequantise(*x, dtype)
    return mxfp8.dequantise(x.q, x.scale, dtype) if isinstance(x, Mx) else x.to(dtype)


def _groups(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row)."""
    return [(e, ends[e - 1] if e else 0, end) for e, end in enumerate(ends)]


def grouped_mm(x: Operand, w: Operand, ends: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Forward: x [T, K], w [E, N, K] -> [T, N] in `dtype`. ends[e]: the end row of expert e; ascending, the last is
    T."""
    a, b = widened(x, dtype), widened(w, dtype)
    out = a.new_empty(len(a), b.shape[1])
    for e, first, end in _groups(ends):
        torch.mm(a[first:end], b[e].T, out=out[first:end])
    return out


def grouped_dgrad(g: Tensor, w: Operand, ends: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of x: g [T, N], w [E, N, K] -> [T, K] in `dtype`. ends as in `grouped_mm`."""
    a, b = widened(g, dtype), widened(w, dtype)
    out = a.new_empty(len(a), b.shape[2])
    for e, first, end in _groups(ends):
        torch.mm(a[first:end], b[e], out=out[first:end])
    return out


def grouped_wgrad(g: Tensor, x: Operand, ends: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of w: g [T, N], x [T, K] -> [E, N, K] in `dtype`; zeros where an expert has no rows."""
    a, b = widened(g, dtype), widened(x, dtype)
    out = a.new_zeros(len(ends), a.shape[1], b.shape[1])
    for e, first, end in _groups(ends):
        torch.mm(a[first:end].T, b[first:end], out=out[e])
    return out


@jit
def _widen(  # type: ignore[no-untyped-def]
    x, scale, rows, first, width, rows_live, cols_live,
    C: tl.constexpr, MX: tl.constexpr, FULL: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """A tile [R, C] of an operand [., width] as numbers, from column `first` on, a multiple of 32; zeros outside of
    rows_live [R] and cols_live [C], which are not used where FULL. One scale is loaded for 32 numbers."""
    cols = first + tl.arange(0, C)
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    live = rows_live[:, None] & cols_live[None, :]
    if FULL:
        raw = tl.load(x + at)
    else:
        raw = tl.load(x + at, mask=live, other=0.0)
    if MX:
        groups = first // 32 + tl.arange(0, C // 32)
        at = rows.to(tl.int64)[:, None] * (width // 32) + groups[None, :]
        if FULL:
            e = tl.load(scale + at).to(tl.int32)
        else:
            mask = rows_live[:, None] & (groups < width // 32)[None, :]
            e = tl.load(scale + at, mask=mask, other=127).to(tl.int32)
        factor = (e << 23).to(tl.float32, bitcast=True)
        number = mxfp8.number(raw, EMULATED)
        blocks = tl.reshape(number, (raw.shape[0], C // 32, 32)) * factor[:, :, None]
        out = tl.reshape(blocks, (raw.shape[0], C))
    else:
        out = raw
    return out


@jit
def _bounds(tiles, number):  # type: ignore[no-untyped-def]
    """(expert, first row, end row) of a tile, as `tiles_of` lists them."""
    return tl.load(tiles + number * 3), tl.load(tiles + number * 3 + 1), tl.load(tiles + number * 3 + 2)


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, xs, w, ws, out, tiles, high, n, k, X: tl.constexpr, W: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, EMULATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BAND: tl.constexpr,
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
        a = _widen(x, xs, near, start, deep, always, inside, BK, X, EVEN, EMULATED)
        if BACK:
            b = _widen(w, ws, expert * n + along, across * BN, k, inside, cols < wide, BN, W, EVEN, EMULATED)
        else:
            b = _widen(w, ws, expert * n + cols, start, k, cols < wide, inside, BK, W, EVEN, EMULATED)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)  # exact: e4m3 times a power of two, or bfloat16 already
        total = tl.dot(a, b if BACK else tl.trans(b), total, input_precision="ieee")
    place = out + rows.to(tl.int64)[:, None] * wide + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (cols < wide)[None, :])


@jit
def _thin_kernel(  # type: ignore[no-untyped-def]
    x, xs, w, ws, out, tiles, high, n, k, X: tl.constexpr, WIDE: tl.constexpr, EMULATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Forward of quantised weights with few rows: a transposed tile [BN, BM], so that weights are the left operand.

    n and k are multiples of BN and BK; arguments as of `_rows_kernel`.
    """
    down, across = tile.banded(tl.program_id(0), high, n // BN, BAND)
    expert, first, end = _bounds(tiles, down)
    if first >= end:
        return
    rows, cols = first + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    near = tl.minimum(rows, end - 1)
    each, inside = tl.full((BM,), 1, dtype=tl.int1), tl.full((BK,), 1, dtype=tl.int1)
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, k, BK):
        a = _widen(
            w, ws, expert * n + cols, start, k, tl.full((BN,), 1, dtype=tl.int1), inside, BK, True, True, EMULATED
        )
        b = _widen(x, xs, near, start, k, each, inside, BK, X, True, EMULATED)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    place = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(place, tl.trans(total).to(out.dtype.element_ty), mask=(rows < end)[:, None])


@jit
def _wgrad_kernel(  # type: ignore[no-untyped-def]
    g, x, xs, out, ends, n, k, X: tl.constexpr, WIDE: tl.constexpr, EMULATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
        b = _widen(x, xs, rows, across * BK, k, live, ks < k, BK, X, False, EMULATED)
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


FEW, FEW_MX, MANY = Shape(64, 128, 128, 4, 3), Shape(64, 128, 128, 4, 3), Shape(128, 256, 64, 8, 3)
"""For few rows per expert, with plain and with quantised operands, and for many."""
THIN = Shape(32, 128, 128, 4, 3)
"""For quantised weights and at most as many rows per expert, on average, as a tile has."""
GRADIENT = Shape(64, 128, 256, 8, 3)
"""Rows of a step, and [rows, columns] of a tile of a weight's gradient."""
SINGLE = Shape(64, 64, 32, 4, 2)
"""For float32, which the tensor cores do not multiply."""
MANY_ROWS = 128
"""Rows of an expert, on average, from which large tiles are used and quantised operands are widened before."""


def _parts(x: Operand) -> tuple[Tensor, Tensor, bool]:
    """(bytes or numbers, scales, whether the operand is quantised)."""
    if isinstance(x, Mx):
        return x.q.contiguous().view(torch.float8_e4m3fn), x.scale.contiguous(), True
    plain = widened(x, torch.bfloat16).contiguous() if isinstance(x, Nv) else x.contiguous()
    return plain, plain, False


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


def _launch(a: Operand, w: Operand, ends: Ends, dtype: torch.dtype, back: bool) -> Tensor:
    count = len(ends)
    many = len(a if isinstance(a, Tensor) else a.q) >= MANY_ROWS * count
    if many and not dispatch.INTERPRETED:  # the product is bound by its operations, which widening would slow
        a, w = (mxfp8.dequantise_triton(*part) if isinstance(part, Mx) else part for part in (a, w))
    x, xs, quantised = _parts(a)
    v, vs, rough = _parts(w)
    n, k = v.shape[1], v.shape[2]
    wide, deep = (k, n) if back else (n, k)
    single = torch.float32 in (x.dtype, v.dtype)
    fits = n % THIN.columns == k % THIN.depth == 0 and len(x) <= THIN.rows * count
    thin = rough and fits and not (back or single)
    shape = THIN if thin else SINGLE if single else MANY if many else FEW_MX if quantised or rough else FEW
    tiles = tiles_of(ends, len(x), shape.rows, x.device)
    out = torch.empty(len(x), wide, dtype=dtype, device=x.device)
    if len(x) and thin:
        _thin_kernel[(len(tiles) * (n // shape.columns),)](
            x, xs, v, vs, out, tiles, len(tiles), n, k, X=quantised, WIDE=dispatch.INTERPRETED,
            EMULATED=dispatch.INTERPRETED, BM=shape.rows, BN=shape.columns, BK=shape.depth, BAND=8,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    elif len(x):
        _rows_kernel[(len(tiles) * dispatch.tiles(wide, shape.columns),)](
            x, xs, v, vs, out, tiles, len(tiles), n, k, X=quantised, W=rough, BACK=back,
            EVEN=deep % shape.depth == 0 and wide % shape.columns == 0,
            WIDE=dispatch.INTERPRETED or single, EMULATED=dispatch.INTERPRETED, BM=shape.rows, BN=shape.columns,
            BK=shape.depth, BAND=8, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return out


def grouped_mm_triton(x: Operand, w: Operand, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Twin of `grouped_mm` for a GPU."""
    return _launch(x, w, ends, dtype, False)


def grouped_dgrad_triton(g: Tensor, w: Operand, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Twin of `grouped_dgrad` for a GPU."""
    return _launch(g, w, ends, dtype, True)


def grouped_wgrad_triton(g: Tensor, x: Operand, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Twin of `grouped_wgrad` for a GPU."""
    g = g.contiguous()
    if isinstance(x, Mx) and not dispatch.INTERPRETED:
        x = mxfp8.dequantise_triton(*x)
    data, scale, quantised = _parts(x)
    n, k = g.shape[1], data.shape[1]
    out = torch.empty(len(ends), n, k, dtype=dtype, device=g.device)
    if isinstance(ends, Tensor):
        bounds = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    else:
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=g.device)
    single = torch.float32 in (g.dtype, data.dtype)
    shape = SINGLE if single else GRADIENT
    _wgrad_kernel[(dispatch.tiles(n, shape.columns) * dispatch.tiles(k, shape.depth), len(ends))](
        g, data, scale, out, bounds, n, k, X=quantised, WIDE=dispatch.INTERPRETED or single,
        EMULATED=dispatch.INTERPRETED, BM=shape.rows, BN=shape.columns, BK=shape.depth, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    return out
