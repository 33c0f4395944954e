"""Gradient of packed causal attention on a GPU, deterministic: no atomics, every sum in one order.

Idea: scores are computed again from the saved log-sum-exp (FlashAttention-2, arXiv 2307.08691). Libraries add each
tile's share of a query's gradient by atomics, whose order changes from run to run. Here one program writes each output:
the first kernel takes a block of 64 keys and loops over the rows that see it, the second takes a tile of rows and loops
over its keys. Both loops ascend, so gradients repeat bit for bit and do not depend on the batch's other sequences.

Layout: rows and tiles as in `forward`. delta [N, H] is the product of gradient and output, summed along D.
Trade-off: both kernels compute the scores: seven matrix products instead of five.

Twin: the backward pass in `block_attention`. Error against float64 autograd: 2e-2 of the gradient's norm in bfloat16,
1e-5 in float32. `operators` calls it for tensors on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.attention.forward import NARROW, SINGLE, SINGLE_WIDE, Tile, tiles
from headrace.kernels.dispatch import HOPPER, Chip, jit, tl


@jit
def _slopes(x, g, ks, vs, norm, delta, limit, key, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(softmax weights, gradient of the scores), each [BM, BK], from x, g [BM, BD] and ks, vs [BK, BD].

    norm: the log-sum-exp in powers of two. Not MASKED: every row sees every key.
    """
    s = tl.dot(x, tl.trans(ks), input_precision="ieee") * (scale * 1.4426950408889634)
    p = tl.exp2(s - norm[:, None])
    if MASKED:
        p = tl.where(key[None, :] <= limit[:, None], p, 0.0)
    dp = tl.dot(g, tl.trans(vs), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


@jit
def _rows(  # type: ignore[no-untyped-def]
    q, g, lse, delta, token, row, group, head, heads, d, live, BD: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """(queries, gradients, log-sum-exp in powers of two, deltas) of rows; zeros where they do not exist."""
    lane = tl.arange(0, BD)
    place = ((token + row // group).to(tl.int64) * heads + head) * group + row % group
    mask = live[:, None] & (lane < d)[None, :]
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    slope = tl.load(g + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    norm = tl.load(lse + place, mask=live, other=0.0) * 1.4426950408889634
    if WIDE:
        x, slope = x.to(tl.float32), slope.to(tl.float32)
    return x, slope, norm, tl.load(delta + place, mask=live, other=0.0), place


@jit
def _keys_step(  # type: ignore[no-untyped-def]
    start, sum_k, sum_v, ks, vs, key, q, g, lse, delta, token, length, group, head, heads, d, scale,
    MASKED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sums of a block of keys after the rows start to start + BM - 1. A row that does not exist has no gradient."""
    row = start + tl.arange(0, BM)
    x, slope, norm, change, _ = _rows(
        q, g, lse, delta, token, row, group, head, heads, d, row < length * group, BD, WIDE
    )
    p, ds = _slopes(x, slope, ks, vs, norm, change, row // group, key, scale, MASKED)
    sum_v = tl.dot(tl.trans(p).to(slope.dtype), slope, sum_v, input_precision="ieee")
    sum_k = tl.dot(tl.trans(ds).to(x.dtype), x, sum_k, input_precision="ieee")
    return sum_k, sum_v


@jit
def _keys_kernel(  # type: ignore[no-untyped-def]
    q, k, v, g, lse, delta, g_k, g_v, blocks, heads, group, d, scale,
    BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of keys; blocks int32 [., 3]: first token of the sequence, first key, tokens of the sequence."""
    at, head = tl.program_id(0) * 3, tl.program_id(1)
    token, first, length = tl.load(blocks + at), tl.load(blocks + at + 1), tl.load(blocks + at + 2)
    key, lane = first + tl.arange(0, BK), tl.arange(0, BD)
    key_at = ((token + key).to(tl.int64) * heads + head)[:, None] * d + lane[None, :]
    mine = (key < length)[:, None] & (lane < d)[None, :]
    ks, vs = tl.load(k + key_at, mask=mine, other=0.0), tl.load(v + key_at, mask=mine, other=0.0)
    if WIDE:
        ks, vs = ks.to(tl.float32), vs.to(tl.float32)
    sum_k = tl.zeros((BK, BD), dtype=tl.float32)
    sum_v = tl.zeros((BK, BD), dtype=tl.float32)
    begin, end = first * group, length * group
    clear = tl.minimum(end, begin + tl.cdiv(BK * group, BM) * BM)  # from here on, rows see the whole block
    for start in range(begin, clear, BM):
        sum_k, sum_v = _keys_step(
            start, sum_k, sum_v, ks, vs, key, q, g, lse, delta, token, length, group, head, heads, d, scale,
            True, BM, BD, WIDE,
        )  # fmt: skip
    for start in range(clear, end, BM):
        sum_k, sum_v = _keys_step(
            start, sum_k, sum_v, ks, vs, key, q, g, lse, delta, token, length, group, head, heads, d, scale,
            False, BM, BD, WIDE,
        )  # fmt: skip
    tl.store(g_k + key_at, sum_k.to(g_k.dtype.element_ty), mask=mine)
    tl.store(g_v + key_at, sum_v.to(g_v.dtype.element_ty), mask=mine)


@jit
def _queries_step(  # type: ignore[no-untyped-def]
    start, total, x, slope, norm, change, limit, k, v, token, length, head, heads, d, scale,
    MASKED: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of a tile of rows after the keys start to start + BK - 1."""
    key, lane = start + tl.arange(0, BK), tl.arange(0, BD)
    key_at = ((token + key).to(tl.int64) * heads + head)[:, None] * d + lane[None, :]
    inside = (lane < d)[None, :]
    if MASKED:
        inside = inside & (key < length)[:, None]
    ks, vs = tl.load(k + key_at, mask=inside, other=0.0), tl.load(v + key_at, mask=inside, other=0.0)
    if WIDE:
        ks, vs = ks.to(tl.float32), vs.to(tl.float32)
    _, ds = _slopes(x, slope, ks, vs, norm, change, limit, key, scale, MASKED)
    return tl.dot(ds.to(ks.dtype), ks, total, input_precision="ieee")


@jit
def _queries_kernel(  # type: ignore[no-untyped-def]
    q, k, v, g, lse, delta, g_q, work, heads, group, d, scale,
    BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of rows, as `forward.tiles` lists them."""
    at, head, lane = tl.program_id(0) * 5, tl.program_id(1), tl.arange(0, BD)
    token, first, rows = tl.load(work + at), tl.load(work + at + 1), tl.load(work + at + 2)
    row = first + tl.arange(0, BM)
    live = row < rows
    x, slope, norm, change, place = _rows(q, g, lse, delta, token, row, group, head, heads, d, live, BD, WIDE)
    length, limit = rows // group, row // group
    total = tl.zeros((BM, BD), dtype=tl.float32)
    last = (tl.minimum(first + BM, rows) - 1) // group + 1
    clear = (first // group + 1) // BK * BK  # all rows see the blocks of keys before this one
    for start in range(0, clear, BK):
        total = _queries_step(
            start, total, x, slope, norm, change, limit, k, v, token, length, head, heads, d, scale, False, BK, BD, WIDE
        )
    for start in range(clear, last, BK):
        total = _queries_step(
            start, total, x, slope, norm, change, limit, k, v, token, length, head, heads, d, scale, True, BK, BD, WIDE
        )
    mask = live[:, None] & (lane < d)[None, :]
    tl.store(g_q + place[:, None] * d + lane[None, :], total.to(g_q.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=32)
def _blocks(lengths: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """The blocks of `width` keys, as `_keys_kernel` takes them. Kept for the other layers."""
    starts = itertools.accumulate(lengths, initial=0)
    listed = [
        (start, first, length)
        for start, length in zip(starts, lengths, strict=False)
        for first in range(0, length, width)
    ]
    return torch.tensor(listed, dtype=torch.int32, device=device).view(-1, 3)


class _Pair(NamedTuple):
    """The tiles of both kernels."""

    of_keys: Tile
    of_queries: Tile


_HOPPER = _Pair(Tile(128, 64, 8, 2), Tile(128, 64, 8, 3))
_BLACKWELL = _Pair(Tile(64, 64, 8, 2), Tile(128, 64, 8, 3))
"""Blackwell's tensor cores read weights and gradients of scores from shared memory: of 128 rows they do not fit."""
_SMALL = _Pair(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2))
_HOPPER_WIDE = _Pair(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2))
_BLACKWELL_WIDE = _Pair(Tile(64, 64, 8, 1), Tile(64, 32, 8, 2))
_SMALL_WIDE = _Pair(Tile(32, 32, 8, 2), Tile(32, 32, 8, 2))


def _pair(dtype: torch.dtype, width: int, chip: Chip) -> _Pair:
    """width: of a head, as a power of two. Only the gradient's order depends on it, and one chip has one order."""
    wide = width > NARROW
    if dtype == torch.float32:
        return _Pair(SINGLE_WIDE, SINGLE_WIDE) if wide else _Pair(SINGLE, SINGLE)
    if chip.shared_bytes < HOPPER.shared_bytes:
        return _SMALL_WIDE if wide else _SMALL
    if chip.major == HOPPER.major:
        return _HOPPER_WIDE if wide else _HOPPER
    return _BLACKWELL_WIDE if wide else _BLACKWELL


def packed_attention_backward_triton(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [N, H, D], k and v [N, V, D], in their dtypes, from `grad`, that of the output [N, H, D].

    out [N, H, D] and lse float32 [N, H] are the results of `packed_attention_triton` for the same arguments.
    lengths: tokens of each sequence; they add up to N.
    """
    q, k, v, grad = (x.contiguous() for x in (q, k, v, grad))
    heads, d = k.shape[1], q.shape[2]
    group = q.shape[1] // heads
    delta = (grad.float() * out.float()).sum(-1)
    g_q, g_k, g_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not sum(lengths):
        return g_q, g_k, g_v
    block = {"BD": max(16, dispatch.power_of_two(d)), "WIDE": dispatch.INTERPRETED}
    by_keys, by_queries = _pair(q.dtype, block["BD"], dispatch.chip(q.device))
    blocks = _blocks(tuple(lengths), by_keys.keys, q.device)
    _keys_kernel[(len(blocks), heads)](
        q, k, v, grad, lse, delta, g_k, g_v, blocks, heads, group, d, scale, BM=by_keys.rows, BK=by_keys.keys,
        num_warps=by_keys.warps, num_stages=by_keys.stages, **block,
    )  # fmt: skip
    starts = itertools.accumulate(lengths, initial=0)
    queries = tuple((start, length, 0, start) for start, length in zip(starts, lengths, strict=False))
    work = tiles(queries, group, by_queries.rows, q.device)
    _queries_kernel[(len(work), heads)](
        q, k, v, grad, lse, delta, g_q, work, heads, group, d, scale, BM=by_queries.rows, BK=by_queries.keys,
        num_warps=by_queries.warps, num_stages=by_queries.stages, **block,
    )  # fmt: skip
    return g_q, g_k, g_v
