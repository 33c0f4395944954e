"""Moves tokens to their experts' rows and back on a GPU: a stable counting sort, copies, and sums in slot order.

Idea: `expert_mlp.plan` orders (token, slot) pairs by expert, then by token, and pads each expert's part. A GPU does so
in three small passes without atomics: a program counts its block of pairs by expert, a sum over blocks gives the first
row of each block for each expert, and another program ranks the block's pairs behind that row. The result equals a
stable sort for every grid; an atomic counter would assign rows in the order of arrival.

`permute` copies rows out. `unpermute` adds a token's k rows, weighted by its gates, in slot order and in float32, so a
token's sum depends on its own rows alone. Each is the other's gradient; the gates' gradient is a product of rows.

Layout: slots int64 [N * k]: the row of each pair. source int64 [P]: the token of each row, 0 for padding. ends int64
[E]: the end row of each expert. P is an upper bound that the host computes without waiting for the device: N k +
min(E, N k) (pad - 1), rounded up to a multiple of pad.
Trade-off: rows after the last part are copied and never used, and the gates' gradient reads each row once more.

Twins: `expert_mlp.plan`, and below. Error: copies are exact; sums of k terms within k 2^-24 of the sum of magnitudes
and one rounding of the result's dtype.
`operators` calls the Triton side for tensors on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

PAIRS = 128
"""Pairs that a program counts and ranks."""


class Places(NamedTuple):
    """The row of each pair, in tensors on the device; P rows, E experts."""

    slots: Tensor
    """int64 [N * k]: the row of each pair."""
    source: Tensor
    """int64 [P]: the token of each row, 0 for padding."""
    ends: Tensor
    """int64 [E]: the end row of each expert."""


def permute(x: Tensor, source: Tensor) -> Tensor:
    """x [N, D] -> [P, D]: the rows that experts multiply."""
    return x.index_select(0, source)


def unpermute(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    """rows [P, D], gates float32 [N, k] -> [N, D]: each token's rows times its gates, added in slot order."""
    k = gates.shape[1]
    weighted = rows.index_select(0, slots).view(-1, k, rows.shape[1]).float() * gates[..., None]
    out = weighted[:, 0]
    for slot in range(1, k):
        out = out + weighted[:, slot]
    return out.to(rows.dtype)


def unpermute_backward(grad: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows [P, D] (0 for padding) and gates [N, k] from that of the result [N, D]."""
    k = gates.shape[1]
    spread = grad.float().repeat_interleave(k, 0)
    g_rows = torch.zeros_like(rows).index_copy_(0, slots, (spread * gates.reshape(-1, 1)).to(rows.dtype))
    return g_rows, (spread * rows.index_select(0, slots).float()).sum(-1).view_as(gates)


@jit
def _hits(experts, count, BP: tl.constexpr, BE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A matrix of pairs by experts: 1 where the router assigned the pair to the expert."""
    pair = tl.program_id(0) * BP + tl.arange(0, BP)
    expert = tl.load(experts + pair, mask=pair < count, other=-1)
    return pair, expert, (expert[:, None] == tl.arange(0, BE)[None, :]).to(tl.int32)


@jit
def _count_kernel(experts, counts, count, e, BP: tl.constexpr, BE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of a block for each expert."""
    _, _, hits = _hits(experts, count, BP, BE)
    at = tl.arange(0, BE)
    tl.store(counts + tl.program_id(0).to(tl.int64) * e + at, tl.sum(hits, 0), mask=at < e)


@jit
def _place_kernel(experts, begins, slots, source, count, e, k, BP: tl.constexpr, BE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Assigns rows to a block's pairs, in order, behind the expert's pairs of earlier blocks."""
    pair, expert, hits = _hits(experts, count, BP, BE)
    rank = tl.sum((tl.cumsum(hits, 0) - hits) * hits, 1)
    live = pair < count
    begin = tl.load(begins + tl.program_id(0).to(tl.int64) * e + expert, mask=live, other=0)
    row = begin + rank
    tl.store(slots + pair, row, mask=live)
    tl.store(source + row, (pair // k).to(tl.int64), mask=live)


@jit
def _copy_kernel(x, source, out, d, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(source + row)
    tl.store(out + row * d + at, tl.load(x + token * d + at, mask=at < d, other=0.0), mask=at < d)


@jit
def _sum_kernel(rows, slots, gates, out, d, K: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token: its K rows in slot order."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), dtype=tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(slots + token * K + slot)
        value = tl.load(rows + row * d + at, mask=at < d, other=0.0).to(tl.float32)
        total += value * tl.load(gates + token * K + slot)
    tl.store(out + token * d + at, total.to(out.dtype.element_ty), mask=at < d)


@jit
def _spread_kernel(grad, rows, slots, gates, g_rows, g_gates, d, k, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One pair: its row's gradient, and its gate's."""
    pair = tl.program_id(0).to(tl.int64)
    row, gate = tl.load(slots + pair), tl.load(gates + pair)
    sums = tl.zeros((BD,), dtype=tl.float32)
    for start in range(0, d, BD):
        at = start + tl.arange(0, BD)
        slope = tl.load(grad + (pair // k) * d + at, mask=at < d, other=0.0).to(tl.float32)
        value = tl.load(rows + row * d + at, mask=at < d, other=0.0).to(tl.float32)
        tl.store(g_rows + row * d + at, (slope * gate).to(g_rows.dtype.element_ty), mask=at < d)
        sums += slope * value
    tl.store(g_gates + pair, tl.sum(sums, 0))


def _width(d: int) -> int:
    return min(1024, dispatch.power_of_two(d))


def plan_triton(experts: Tensor, count: int, pad: int, capacity: int = 0) -> Places:
    """Twin of `expert_mlp.plan` for a GPU: experts int64 [N, k], each below `count`. Nothing waits for the device.

    capacity: least number of rows.
    """
    pairs, k, device = experts.numel(), experts.shape[1], experts.device
    flat, blocks = experts.reshape(-1).contiguous(), dispatch.tiles(experts.numel(), PAIRS)
    rows = dispatch.tiles(pairs + min(count, pairs) * (pad - 1), pad) * pad
    source = torch.zeros(max(rows, capacity), dtype=torch.int64, device=device)
    slots = torch.empty(pairs, dtype=torch.int64, device=device)
    if not pairs:
        return Places(slots, source, torch.zeros(count, dtype=torch.int64, device=device))
    counts = torch.empty(blocks, count, dtype=torch.int64, device=device)
    wide = dispatch.power_of_two(count)
    _count_kernel[(blocks,)](flat, counts, pairs, count, BP=PAIRS, BE=wide)
    sizes = counts.sum(0)
    ends = ((sizes + pad - 1) // pad * pad).cumsum(0)
    first = torch.cat((ends.new_zeros(1), ends[:-1]))
    begins = (first + counts.cumsum(0) - counts).contiguous()
    _place_kernel[(blocks,)](flat, begins, slots, source, pairs, count, k, BP=PAIRS, BE=wide)
    return Places(slots, source, ends)


def permute_triton(x: Tensor, source: Tensor) -> Tensor:
    """Twin of `permute` for a GPU. Its gradient is `unpermute_triton` with gates of 1: padding rows have none.

    Without tokens all rows are padding, and zeros.
    """
    x = x.contiguous()
    d = x.shape[1]
    out = x.new_empty(len(source), d) if len(x) else x.new_zeros(len(source), d)
    if len(x) and out.numel():
        _copy_kernel[(len(source), dispatch.tiles(d, _width(d)))](x, source, out, d, BD=_width(d))
    return out


def unpermute_triton(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    """Twin of `unpermute` for a GPU."""
    rows, gates = rows.contiguous(), gates.contiguous()
    d = rows.shape[1]
    out = rows.new_empty(len(gates), d)
    if out.numel():
        grid = (len(gates), dispatch.tiles(d, _width(d)))
        _sum_kernel[grid](rows, slots, gates, out, d, K=gates.shape[1], BD=_width(d))
    return out


def unpermute_backward_triton(grad: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `unpermute_backward` for a GPU."""
    grad, rows, gates = grad.contiguous(), rows.contiguous(), gates.contiguous()
    g_rows, g_gates = torch.zeros_like(rows), torch.empty_like(gates)
    d = rows.shape[1]
    if grad.numel():
        _spread_kernel[(len(slots),)](grad, rows, slots, gates, g_rows, g_gates, d, gates.shape[1], BD=_width(d))
    return g_rows, g_gates
