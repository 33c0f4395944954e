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


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
        shares = _shares(q, k, hidden, scale)
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
        g_scores = g_shares.float().sub_(delta).mul_(shares).mul_(ctx.scale).to(q.dtype)
        return torch.bmm(g_scores, k), torch.bmm(g_scores.transpose(1, 2), q), g_v, None, None


def _shares(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    batch, rows, keys = scores.shape
    last = scores.view(len(hidden), batch // len(hidden), rows, keys)[..., keys - hidden.shape[2] :]
    last.masked_fill_(hidden[:, None], -torch.inf)
    return scores.softmax(-1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """q [B * V, T * G, D] with a token's query heads side by side, k and v [B * V, S, D] -> [B * V, T * G, D].

    hidden: bool [B or 1, T * G, R], True where a query does not see one of the last R keys; it sees all before them.
    Each query must see one. Differentiable in q, k and v.
    """
    if torch.is_grad_enabled():
        out: Tensor = _GroupedAttention.apply(q, k, v, hidden, scale)  # type: ignore[no-untyped-call]
        return out
    return torch.bmm(_shares(q, k, hidden, scale), v)
