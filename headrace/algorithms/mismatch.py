"""How far sampler and trainer disagree about the same tokens.

With d = log p_trainer - log p_sampler on tokens drawn by the sampler (Schulman, "Approximating KL divergence", 2020):
    k1 = mean(-d)               unbiased for KL(sampler || trainer), noisy, may be negative
    k3 = mean(exp(d) - 1 - d)   unbiased, never negative, but its variance explodes as the two diverge
On tokens of the version being trained, any difference is rounding or a bug; on tokens of older versions the difference
contains the updates since. Watch k1: in our runs it rose before every collapse.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mismatch(NamedTuple):
    """Over `tokens` sampled tokens; all zero when there are none."""

    tokens: int
    k1: float
    k3: float
    max_abs: float
    differ: float = 0.0
    """Share of tokens whose two numbers are not equal, NaN among them."""


def mismatch(trainer: Tensor, sampler: Tensor) -> Mismatch:
    """Compare log-probabilities [M] of the same tokens; sums run in float64. NaN anywhere shows as NaN."""
    if trainer.shape != sampler.shape:
        raise ValueError(
            f"expected log-probabilities of equal shapes, got trainer {tuple(trainer.shape)}, sampler "
            f"{tuple(sampler.shape)}"
        )
    if trainer.numel() == 0:
        return Mismatch(0, 0.0, 0.0, 0.0)
    d = trainer.detach().double() - sampler.detach().double()
    differ = float((d != 0).double().mean())
    return Mismatch(d.numel(), float(-d.mean()) + 0.0, float((torch.expm1(d) - d).mean()), float(d.abs().max()), differ)


def router_flips(left: Tensor, right: Tensor) -> float:
    """Share of (position, layer) pairs whose sets of experts differ; another order within a set is not a difference.

    left, right: integer [positions, layers, top_k]. Pairs where a side has no record (-1) are left out.
    """
    flips, compared = flipped(left, right)
    return flips / compared if compared else 0.0


def flipped(left: Tensor, right: Tensor) -> tuple[int, int]:
    """(pairs whose sets of experts differ, pairs with a record on both sides), as `router_flips` counts them."""
    if left.shape != right.shape:
        raise ValueError(f"expected routes of equal shapes, got {tuple(left.shape)} and {tuple(right.shape)}")
    compared = (left >= 0).all(-1) & (right >= 0).all(-1)
    differ = (left.sort(-1).values != right.sort(-1).values).any(-1)
    return int((differ & compared).sum()), int(compared.sum())
