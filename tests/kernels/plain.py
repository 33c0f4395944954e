"""Attention as its formula says, in whatever dtype the operands have."""

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
