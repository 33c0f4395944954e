"""Attention of ordinary mode as two products and a softmax, with the query heads of a group as rows of one matrix.

Idea: the fused attention of torch is built for long causal sequences. With a mask it is several times slower than two
batched products on a CPU (a decode step of 32 sequences over 320 keys of SmolLM2: 16.0 against 2.7 ms in bfloat16, 3.5
against 2.9 ms in float32), and it repeats keys and values for each query head of a group. Here a group's queries stand
below each other, so that keys and values are read once.

Trade-off: the scores of a call are in memory, B x H x T x S numbers. `policy.attention` uses this for decoding, where T
is small, and for training on short sequences. Exact mode does not use it: the order of these sums depends on S.
Dimensions: B sequences, V key-value heads, G query heads for each of them, T queries, S keys, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.attention.paged_product import paged_product


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        q = q * scale
        shares = _shares(torch.bmm(q, k.transpose(1, 2)), mask)
        ctx.save_for_backward(q, k, v, shares)
        ctx.scale = scale
        return torch.bmm(shares, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, shares = ctx.saved_tensors
        grad = grad.contiguous()
        g_v = torch.bmm(shares.transpose(1, 2), grad)
        g_shares = torch.bmm(grad, v.transpose(1, 2))
        delta = (g_shares.float() * shares).sum(-1, keepdim=True)
        g_scores = g_shares.float().sub_(delta).mul_(shares).to(q.dtype)
        return torch.bmm(g_scores, k).mul_(ctx.scale), torch.bmm(g_scores.transpose(1, 2), q), g_v, None, None


def _shares(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax of scores [B * V, T * G, S], which are overwritten; mask as in `grouped_attention`."""
    batch, rows, keys = scores.shape
    last = scores.view(len(mask), batch // len(mask), rows, keys)[..., keys - mask.shape[2] :]
    last.add_(mask[:, None])
    return scores.softmax(-1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [B * V, T * G, D] with a token's query heads side by side, k and v [B * V, S, D] -> [B * V, T * G, D].

    mask: [B or 1, T * G, R] in q's dtype, minus infinity where a query does not see one of the last R keys, otherwise
    0 (`mask_of`); a query sees all keys before them, and at least one. Differentiable in q, k and v.
    """
    out: Tensor = _GroupedAttention.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
    return out


def paged_grouped_attention(
    q: Tensor, keys: Tensor, values: Tensor, places: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """`grouped_attention` over keys and values in a pool [U, L, D], without a gradient.

    places: int64 [B * V * n], the n rows of the pool that hold the keys of each sequence and head.
    """
    shape = len(places) // len(q) * keys.shape[1], keys.shape[2]
    shares = _shares(paged_product(q * scale, keys, places, shape, transposed=True), mask)
    return paged_product(shares, values, places, shape, transposed=False)


def mask_of(hidden: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The mask of `grouped_attention`: bool [B, T, R], True where a query does not see a key -> [B, T * G, R]."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf).repeat_interleave(group, 1)
