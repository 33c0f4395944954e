"""Products of many experts in one launch: forward, dgrad and wgrad, operands plain or in MXFP8.

Idea: the rows of an expert are contiguous, as `expert_mlp.plan` lays them out; `ends` says where each expert's rows
end. One tile shape for every group, the reduction in ascending tiles, no split: a row's bits do not depend on its
group's size. An MXFP8 operand comes as its bytes and scales along the last dimension and is widened in registers, which
is exact; the sums are float32.

    forward  y[t] = x[t] @ w[e].T         x [T, K], w [E, N, K] -> [T, N]
    dgrad    d[t] = g[t] @ w[e]           g [T, N], w [E, N, K] -> [T, K]
    wgrad    v[e] = sum_t g[t] x[t].T     g [T, N], x [T, K]    -> [E, N, K]

The table in `mxfp8` lists the quantised operands: weights and activations are quantised, gradients are not.

Trade-off: widening in registers leaves Hopper's tensor cores at their bfloat16 rate: there MXFP8 saves bytes (few rows
per expert), not operations. Blackwell's block-scaled product would take the same bytes; it is not used yet.

Error against float64 of the widened operands: K 2^-24 of the sum of magnitudes, and one rounding of the result's dtype.
`operators` calls the Triton side for tensors on a GPU. Checked in Triton's interpreter; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch, mxfp8
from headrace.kernels.dispatch import jit, tl


class Mx(NamedTuple):
    """A quantised operand: float8_e4m3fn [..., K] and scales uint8 [..., K / 32]."""

    q: Tensor
    scale: Tensor


Operand = Tensor | Mx
Ends = Sequence[int] | Tensor
"""The end row of each expert. As int64 [E] on the device the host does not wait for it; it then consists of multiples
of `TILE`."""
TILE, WIDTH = 64, 128
"""Rows and columns of a tile. They are small because most experts have few rows under skewed routing."""


def widened(x: Operand, dtype: torch.dtype) -> Tensor:
    """An operand as numbers."""
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
def _widen(x, scale, rows, cols, width, live, MX: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [rows, cols] of an operand [., width] as numbers; 0 outside of `live`."""
    if MX:
        byte = tl.load(x + rows * width + cols, mask=live, other=0).to(tl.int32)
        size, mantissa = (byte >> 3) & 15, byte & 7
        normal = (((size + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
        number = tl.where(size == 0, mantissa.to(tl.float32) * 0.001953125, normal)
        number = tl.where((byte & 128) != 0, -number, number)
        e = tl.load(scale + rows * (width // 32) + cols // 32, mask=live, other=127).to(tl.int32)
        out = number * (e << 23).to(tl.float32, bitcast=True)
    else:
        out = tl.load(x + rows * width + cols, mask=live, other=0.0)
    return out


@jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, xs, w, ws, out, tiles, n, k, X: tl.constexpr, W: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Forward, or dgrad (BACK): one tile of rows of one expert; tiles int32 [., 3]: expert, first row, end row."""
    at = tl.program_id(0) * 3
    expert, first, end = tl.load(tiles + at), tl.load(tiles + at + 1), tl.load(tiles + at + 2)
    rows = first + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    wide = k if BACK else n
    deep = n if BACK else k
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, deep, BK):
        along = start + tl.arange(0, BK)
        live = (rows < end)[:, None] & (along < deep)[None, :]
        a = _widen(x, xs, rows[:, None], along[None, :], deep, live, X)
        inside = (along < deep)[:, None] & (cols < wide)[None, :]
        if BACK:
            b = _widen(w, ws, expert * n + along[:, None], cols[None, :], k, inside, W)
        else:
            b = _widen(w, ws, expert * n + cols[None, :], along[:, None], k, inside, W)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)  # exact: e4m3 times a power of two, or bfloat16 already
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + rows[:, None] * wide + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (cols < wide)[None, :])


@jit
def _wgrad_kernel(  # type: ignore[no-untyped-def]
    g, x, xs, out, ends, n, k, X: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile [BN, BK] of one expert's gradient: a walk over its rows, ascending."""
    expert = tl.program_id(0)
    first, end = tl.load(ends + expert), tl.load(ends + expert + 1)
    ns = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.program_id(2) * BK + tl.arange(0, BK)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for start in range(first, end, BM):
        rows = start + tl.arange(0, BM)
        a = tl.load(g + rows[None, :] * n + ns[:, None], mask=(rows < end)[None, :] & (ns < n)[:, None], other=0.0)
        b = _widen(x, xs, rows[:, None], ks[None, :], k, (rows < end)[:, None] & (ks < k)[None, :], X)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + (expert * n + ns[:, None]) * k + ks[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(ns < n)[:, None] & (ks < k)[None, :])


def _parts(x: Operand) -> tuple[Tensor, Tensor, bool]:
    """(bytes or numbers, scales, whether the operand is quantised)."""
    if isinstance(x, Mx):
        return x.q.contiguous().view(torch.uint8), x.scale.contiguous(), True
    plain = x.contiguous()
    return plain, plain, False


def _tiles(ends: Ends, rows: int, device: torch.device) -> Tensor:
    """int32 [., 3]: expert, first row, end row of each tile.

    Ends that are on the device are not copied to the host: they are multiples of `TILE`, and tiles beyond the last have
    no row.
    """
    if isinstance(ends, Tensor):
        first = torch.arange(0, rows, TILE, device=device)
        expert = torch.searchsorted(ends, first, right=True).clamp_(max=len(ends) - 1)
        return torch.stack((expert, first, ends.index_select(0, expert)), 1).to(torch.int32)
    table = [(e, row, end) for e, first, end in _groups(ends) for row in range(first, end, TILE)]
    return torch.tensor(table, dtype=torch.int32, device=device).view(-1, 3)


def _launch(a: Operand, w: Operand, ends: Ends, dtype: torch.dtype, back: bool) -> Tensor:
    x, xs, quantised = _parts(a)
    v, vs, rough = _parts(w)
    n, k = v.shape[1], v.shape[2]
    wide = k if back else n
    tiles = _tiles(ends, len(x), x.device)
    out = torch.empty(len(x), wide, dtype=dtype, device=x.device)
    if len(tiles):
        full = dispatch.INTERPRETED or torch.float32 in (x.dtype, v.dtype)
        _rows_kernel[(len(tiles), dispatch.tiles(wide, WIDTH))](
            x,
            xs,
            v,
            vs,
            out,
            tiles,
            n,
            k,
            X=quantised,
            W=rough,
            BACK=back,
            WIDE=full,
            BM=TILE,
            BN=WIDTH,
            BK=64,
            num_warps=8 if quantised or rough else 4,
        )
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
    data, scale, quantised = _parts(x)
    n, k = g.shape[1], data.shape[1]
    out = torch.empty(len(ends), n, k, dtype=dtype, device=g.device)
    if isinstance(ends, Tensor):
        bounds = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    else:
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=g.device)
    full = dispatch.INTERPRETED or torch.float32 in (g.dtype, data.dtype)
    _wgrad_kernel[(len(ends), dispatch.tiles(n, 64), dispatch.tiles(k, WIDTH))](
        g, data, scale, out, bounds, n, k, X=quantised, WIDE=full, BM=64, BN=64, BK=WIDTH, num_warps=4
    )
    return out
