"""Gradient of packed causal attention on a GPU, deterministic: no atomics, every sum in one order.

Idea: scores are computed again from the saved log-sum-exp (FlashAttention-2, arXiv 2307.08691). Libraries add each
tile's share of a query's gradient by atomics, whose order changes from run to run. Here one program writes each output:
the first kernel takes a block of 64 keys and loops over the rows that see it, the second takes a tile of rows and loops
over its keys. Both loops ascend, so gradients repeat bit for bit and do not depend on the batch's other sequences.

Layout: rows and tiles as in `attention_forward`. delta [N, H] is the product of gradient and output, summed along D.
Trade-off: both kernels compute the scores: seven matrix products instead of five.

Twin: the backward pass in `block_attention`. Error against float64 autograd: 2e-2 of the gradient's norm in bfloat16,
1e-5 in float32. `operators` calls it for
tensors on a GPU. Checked in Triton's interpreter; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.attention_forward import ROWS, tiles
from headrace.kernels.block_attention import BLOCK
from headrace.kernels.dispatch import jit, tl


@jit
def _slopes(x, g, ks, vs, norm, delta, limit, key, length, live, scale):  # type: ignore[no-untyped-def]
    """(softmax weights, gradient of the scores), each [BM, BK], from x, g [BM, BD] and ks, vs [BK, BD]."""
    s = tl.dot(x, tl.trans(ks), input_precision="ieee") * scale
    seen = (key[None, :] <= limit[:, None]) & (key < length)[None, :] & live[:, None]
    p = tl.where(seen, tl.exp(s - norm[:, None]), 0.0)
    dp = tl.dot(g, tl.trans(vs), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


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
    for start in range(first * group, length * group, BM):
        row = start + tl.arange(0, BM)
        live = row < length * group
        place = ((token + row // group).to(tl.int64) * heads + head) * group + row % group
        mask = live[:, None] & (lane < d)[None, :]
        x = tl.load(q + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
        slope = tl.load(g + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
        norm, own_delta = tl.load(lse + place, mask=live, other=0.0), tl.load(delta + place, mask=live, other=0.0)
        if WIDE:
            x, slope = x.to(tl.float32), slope.to(tl.float32)
        p, ds = _slopes(x, slope, ks, vs, norm, own_delta, row // group, key, length, live, scale)
        sum_v += tl.dot(tl.trans(p).to(slope.dtype), slope, input_precision="ieee")
        sum_k += tl.dot(tl.trans(ds).to(x.dtype), x, input_precision="ieee")
    tl.store(g_k + key_at, sum_k.to(g_k.dtype.element_ty), mask=mine)
    tl.store(g_v + key_at, sum_v.to(g_v.dtype.element_ty), mask=mine)


@jit
def _queries_kernel(  # type: ignore[no-untyped-def]
    q, k, v, g, lse, delta, g_q, work, heads, group, d, scale,
    BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of rows, as `attention_forward.tiles` lists them."""
    at, head, lane = tl.program_id(0) * 5, tl.program_id(1), tl.arange(0, BD)
    token, first, rows = tl.load(work + at), tl.load(work + at + 1), tl.load(work + at + 2)
    row = first + tl.arange(0, BM)
    live = row < rows
    place = ((token + row // group).to(tl.int64) * heads + head) * group + row % group
    mask = live[:, None] & (lane < d)[None, :]
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    slope = tl.load(g + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    norm, own_delta = tl.load(lse + place, mask=live, other=0.0), tl.load(delta + place, mask=live, other=0.0)
    if WIDE:
        x, slope = x.to(tl.float32), slope.to(tl.float32)
    length = rows // group
    total = tl.zeros((BM, BD), dtype=tl.float32)
    for start in range(0, (tl.minimum(first + BM, rows) - 1) // group + 1, BK):
        key = start + tl.arange(0, BK)
        key_at = ((token + key).to(tl.int64) * heads + head)[:, None] * d + lane[None, :]
        inside = (key < length)[:, None] & (lane < d)[None, :]
        ks, vs = tl.load(k + key_at, mask=inside, other=0.0), tl.load(v + key_at, mask=inside, other=0.0)
        if WIDE:
            ks, vs = ks.to(tl.float32), vs.to(tl.float32)
        _, ds = _slopes(x, slope, ks, vs, norm, own_delta, row // group, key, length, live, scale)
        total += tl.dot(ds.to(ks.dtype), ks, input_precision="ieee")
    tl.store(g_q + place[:, None] * d + lane[None, :], total.to(g_q.dtype.element_ty), mask=mask)


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
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    listed = [
        (start, first, length)
        for start, length in zip(starts, lengths, strict=True)
        for first in range(0, length, BLOCK)
    ]
    if listed:
        sizes: dict[str, Any] = {"BM": ROWS, "BK": BLOCK, "BD": max(16, dispatch.power_of_two(d)), "num_warps": 8}
        sizes["WIDE"] = dispatch.INTERPRETED
        blocks = torch.tensor(listed, dtype=torch.int32, device=q.device)
        _keys_kernel[(len(listed), heads)](
            q, k, v, grad, lse, delta, g_k, g_v, blocks, heads, group, d, scale, num_stages=2, **sizes
        )
        pairs = [(start, length, 0, start) for start, length in zip(starts, lengths, strict=True)]
        work = tiles(pairs, group, q.device)
        _queries_kernel[(len(work), heads)](q, k, v, grad, lse, delta, g_q, work, heads, group, d, scale, **sizes)
    return g_q, g_k, g_v
