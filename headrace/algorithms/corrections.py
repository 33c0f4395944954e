"""What a sampled token still teaches once the policy has moved on: six corrections for the sampler's age, by name.

With r = p_trainer / p_behaviour of a token, s = exp(mean of log r over its sequence) and A its advantage:
    truncated        min(r, clip), no gradient through it
                     TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    masked           r if low <= r <= clip, else nothing
                     IcePop (Ling team, 2025)
    clipped          min(r A, clip(r) A)
                     PPO (Schulman et al., arXiv 1707.06347)
    decoupled        min(p_prox / p_behaviour, clip) x min(u A, clip(u) A), u = p_trainer / p_prox
                     Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298
    sequence         min(s A, clip(s) A)
                     GSPO in its token form (Zheng et al., arXiv 2507.18071)
    sequence_masked  min(r, clip) if s is in the band, else nothing
                     geometric rejection (Liu, Li et al. 2025, "When Speed Kills Stability"; SkyRL: 0.99 to 1.01)
The band of the last four is `band`; PPO's is (0.8, 1.2), GSPO's as narrow as (0.9997, 1.0004).

Why a choice: upper truncation bounds the variance and nothing else. A token whose probability fell far and that was
bad is still pushed down; masks and bands cut that side too. At a lag of four and a learning rate of 2e-3 the tiny
policy collapsed under truncation, under masks and, later, under sequence masks; clipping held it, and so did the guard
(`python -m benchmarks.lag_study`: one or two seeds each). The decoupled objective keeps the trust region around the
proximal policy, the trainer's own re-scored log-probabilities from before the step: the sampler's age is then no
reason to clip. With one update a step u is 1 and it is `truncated`; it differs from the second minibatch on.

Left out: GSPO's mean over a sequence's tokens and the critic; the divisor is Dr. GRPO's constant. A sequence is what
the model saw as one context: a segment, so a trajectory with summaries has several.

Layout: flat vectors over M sampled tokens, float32; `lengths` cut them into sequences.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Weighting = Literal["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"]


class Band(NamedTuple):
    """Ratios within which a token (or sequence) still teaches; both above 0."""

    low: float = 0.8
    high: float = 1.2


class Corrected(NamedTuple):
    """What -sum(terms) / divisor is the loss of; `cut` [M] (bool) are tokens whose ratio was cut or masked."""

    terms: Tensor
    cut: Tensor


def importance_weights(
    logp: Tensor, behaviour: Tensor, *, clip: float, weighting: Literal["truncated", "masked"], low: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weights [M] without gradient, and which tokens [M] (bool) were cut.

    logp, behaviour: float32 [M], log-probabilities by trainer and sampler. clip: upper bound on the ratio (> 0).
    """
    ratio = torch.exp(logp.detach() - behaviour)
    if weighting == "truncated":
        return ratio.clamp(max=clip), ratio > clip
    outside = (ratio > clip) | (ratio < low)
    return ratio.masked_fill(outside, 0.0), outside


def pessimistic(ratio: Tensor, advantage: Tensor, band: Band) -> Corrected:
    """min(ratio A, clip(ratio) A): beyond the band on the side to which A pushes, a constant without gradient."""
    cut = ((ratio > band.high) & (advantage > 0.0)) | ((ratio < band.low) & (advantage < 0.0))
    kept = torch.where(cut, ratio.detach().clamp(band.low, band.high), ratio)
    return Corrected(kept * advantage, cut)


def geometric_means(log_ratio: Tensor, lengths: Sequence[int]) -> Tensor:
    """exp(mean of log_ratio over its sequence), one per token [M]. ValueError when `lengths` do not add up to M."""
    if sum(lengths) != len(log_ratio):
        raise ValueError(f"sequences of {sum(lengths)} tokens do not cut {len(log_ratio)} tokens")
    parts = torch.split(log_ratio, list(lengths))
    return torch.cat([part.mean().exp().expand(len(part)) for part in parts if len(part)]) if parts else log_ratio


def corrected(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    weighting: Weighting,
    *,
    clip: float,
    low: float = 0.0,
    band: Band | None = None,
    proximal: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Corrected:
    """The objective's terms [M]; their sum is to be raised.

    logp: float32 [M] with gradient; behaviour, advantage, proximal: float32 [M] without. proximal: the trainer's
    log-probabilities from before the step; none means that they are `logp`. lengths: tokens of each sequence in order,
    needed by the two sequence corrections.
    """
    band = band or Band()
    if weighting == "truncated" or weighting == "masked":
        weights, cut = importance_weights(logp, behaviour, clip=clip, weighting=weighting, low=low)
        return Corrected(weights * advantage * logp, cut)
    if weighting == "clipped":
        return pessimistic(torch.exp(logp - behaviour), advantage, band)
    if weighting == "decoupled":
        fixed = logp.detach() if proximal is None else proximal
        weights, above = importance_weights(fixed, behaviour, clip=clip, weighting="truncated")
        terms, cut = pessimistic(torch.exp(logp - fixed), advantage, band)
        return Corrected(weights * terms, cut | above)
    if lengths is None:
        raise ValueError(f"weighting {weighting!r} needs the lengths of the sequences")
    means = geometric_means(logp.detach() - behaviour, lengths)
    if weighting == "sequence":
        return pessimistic(means * torch.exp(logp - logp.detach()), advantage, band)
    outside = (means < band.low) | (means > band.high)
    weights, above = importance_weights(logp, behaviour, clip=clip, weighting="truncated")
    return Corrected(weights.masked_fill(outside, 0.0) * advantage * logp, outside | above)
