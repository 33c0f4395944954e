"""Attention and experts' products as their formulas say, in whatever dtype the operands have."""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """The formula: (out [N, H, D], log-sum-exp [N, H])."""
    group = q.shape[1] // k.shape[1]
    out, norm = [], []
    for a, b, c in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b.repeat_interleave(group, 1)) * scale
        future = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c.repeat_interleave(group, 1)))
        norm.append(scores.logsumexp(-1).T)
    return torch.cat(out), torch.cat(norm)


def _groups(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row)."""
    return [(e, ends[e - 1] if e else 0, end) for e, end in enumerate(ends)]


def grouped_mm(x: Tensor, w: Tensor, ends: Sequence[int]) -> Tensor:
    """x [T, K], w [E, N, K] -> [T, N]. ends[e]: the end row of expert e; ascending, the last is T."""
    return torch.cat([x[first:end] @ w[e].T for e, first, end in _groups(ends)])


def grouped_dgrad(g: Tensor, w: Tensor, ends: Sequence[int]) -> Tensor:
    """Gradient of x: g [T, N], w [E, N, K] -> [T, K]."""
    return torch.cat([g[first:end] @ w[e] for e, first, end in _groups(ends)])


def grouped_wgrad(g: Tensor, x: Tensor, ends: Sequence[int]) -> Tensor:
    """Gradient of w: g [T, N], x [T, K] -> [E, N, K]; zeros where an expert has no rows."""
    return torch.stack([g[first:end].T @ x[first:end] for _, first, end in _groups(ends)])
