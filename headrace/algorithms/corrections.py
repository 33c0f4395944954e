"""Corrections for the age of a sampled token: six built-in ones by name, and any other through the registry.

With r = p_trainer / p_behaviour of a token, s = exp(mean of log r over its sequence) and A its advantage:
    truncated        min(r, clip), no gradient through it
                     TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    masked           r if low <= r <= clip, else 0
                     IcePop (Ling team, 2025)
    clipped          min(r A, clip(r) A)
                     PPO (Schulman et al., arXiv 1707.06347); DAPO's clip-higher (2503.14476) is the band 0.8 to 1.28
    decoupled        min(p_prox / p_behaviour, clip) x min(u A, clip(u) A), u = p_trainer / p_prox
                     Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298
    sequence         min(s A, clip(s) A)
                     GSPO in its token form (Zheng et al., arXiv 2507.18071)
    sequence_masked  min(r, clip) if s is in the band, else 0
                     geometric rejection (Liu, Li et al. 2025, "When Speed Kills Stability"; SkyRL: 0.99 to 1.01)
The last four use `band`: PPO's is (0.8, 1.2), GSPO's is as narrow as (0.9997, 1.0004).

A minimum does not bound a token with A < 0 whose ratio is large: -14 nats at the sampler against -1 here is a ratio of
442,000. Dual clip (Ye et al., arXiv 1912.09729) bounds it: the min(u A, clip(u) A) of clipped, decoupled and sequence
becomes max(that, c A) where A < 0, constant and without gradient for ratios u above c. The other three bound their
ratios by `clip`.

Why there is a choice: an upper truncation only bounds the variance. A token whose probability fell far and whose
advantage is negative is still lowered; masks and bands stop that too. At a lag of four and a learning rate of 2e-3
the tiny policy collapsed under truncation, under masks and, later, under sequence masks; clipping and the guard each
kept it from collapsing (`python -m benchmarks.lag_study`: one or two seeds each). The decoupled objective keeps the
trust region around the proximal policy, which is the trainer's own log-probabilities from before the step, so a
sampler's age alone does not cause clipping. With one update per step u is 1 and `decoupled` equals `truncated`; they
differ from the second minibatch on.

GSPO's mean over a sequence's tokens is a setting of the objective, `losses.Objective.sequence_mean`. A critic is not
included. A sequence is one context of the model, a segment: a trajectory with summaries has several.

Layout: flat vectors over M sampled tokens, float32, all on one device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 80.0
"""Nats between two log-probabilities, above which a ratio grows no more: the gradient of an infinite one is NaN, also
where it is cut, so one token would cost a batch."""


class Band(NamedTuple):
    """Ratios within which a token (or sequence) still has a gradient; both above 0."""

    low: float = 0.8
    high: float = 1.2


class Correction(NamedTuple):
    """The settings of a correction. `weighting` is its name in `registry.LOSSES`, `options` belong to a plugin."""

    weighting: str = "truncated"
    clip: float = 2.0
    """Upper bound on a ratio that is used as a weight, above 0."""
    low: float = 0.0
    """Lower bound of `masked`."""
    band: Band = Band()
    dual: float = 0.0
    """c of dual clip, above `band.high`; 0: none."""
    options: Mapping[str, object] = {}


class SampledTokens(NamedTuple):
    """M sampled tokens: float32 [M] each, of which `logp` alone carries a gradient."""

    logp: Tensor
    """Log-probabilities by the trainer."""
    behaviour: Tensor
    """Log-probabilities by the sampler."""
    advantage: Tensor
    proximal: Tensor | None = None
    """The trainer's log-probabilities from before the step; None means that they equal `logp`."""
    reference: Tensor | None = None
    """Log-probabilities by the reference policy, needed for a KL term."""
    lengths: Sequence[int] | None = None
    """Tokens of each sequence, in order; needed by the sequence corrections."""


class Corrected(NamedTuple):
    """The loss is -sum(terms) / divisor; terms float32 [M]. `cut` bool [M] marks tokens whose ratio was cut or
    masked."""

    terms: Tensor
    cut: Tensor
    dual: Tensor | None = None
    """bool [M]: the tokens in `cut` that dual clip bounds; None without it."""
    metrics: Mapping[str, Tensor] = {}
    """Figures of the loss's own, [M] each, by a name of lower-case letters, digits and _. The step reports the mean of
    each over the batch's tokens with a gradient: `StepDone.metrics`, the live page, every exporter."""


Loss = Callable[[SampledTokens, Correction], Corrected]
"""What `registry.LOSSES` holds: the terms [M] whose sum is to be raised. A plugin may also take `options`."""


def importance_weights(tokens: SampledTokens, clip: float, low: float | None = None) -> tuple[Tensor, Tensor]:
    """Ratios p_trainer / p_behaviour [M] without gradient, and the tokens [M] (bool) that were cut.

    Without `low` a ratio above `clip` becomes `clip`; with it, a ratio outside of low..clip becomes 0.
    """
    ratio = torch.exp(tokens.logp.detach() - tokens.behaviour)
    if low is None:
        return ratio.clamp(max=clip), ratio > clip
    outside = (ratio > clip) | (ratio < low)
    return ratio.masked_fill(outside, 0.0), outside


def pessimistic(ratio: Tensor, advantage: Tensor, settings: Correction) -> Corrected:
    """min(ratio A, clip(ratio) A): beyond the band, on the side to which A moves the ratio, the term is constant and
    has no gradient. With `settings.dual` it is also constant where A < 0 and the ratio is above that."""
    band = settings.band
    cut = ((ratio > band.high) & (advantage > 0.0)) | ((ratio < band.low) & (advantage < 0.0))
    bounded = torch.where(cut, ratio.detach().clamp(band.low, band.high), ratio)
    if not settings.dual:
        return Corrected(bounded * advantage, cut)
    above = (ratio > settings.dual) & (advantage < 0.0)
    bounded = torch.where(above, settings.dual, bounded)
    return Corrected(bounded * advantage, cut | above, above)


def geometric_means(log_ratio: Tensor, lengths: Sequence[int]) -> Tensor:
    """exp(mean of log_ratio over its sequence), one per token [M]. ValueError when `lengths` do not add up to M."""
    if sum(lengths) != len(log_ratio):
        raise ValueError(f"expected sequences of {len(log_ratio)} tokens in all, got {sum(lengths)}")
    parts = torch.split(log_ratio, list(lengths))
    means = [part.mean().clamp(max=_MOST).exp().expand(len(part)) for part in parts if len(part)]
    return torch.cat(means) if parts else log_ratio


def truncated(tokens: SampledTokens, settings: Correction) -> Corrected:
    """TIS: truncated importance sampling."""
    weights, cut = importance_weights(tokens, settings.clip)
    return Corrected(weights * tokens.advantage * tokens.logp, cut)


def masked(tokens: SampledTokens, settings: Correction) -> Corrected:
    """IcePop: tokens whose ratio is outside of low..clip have no gradient."""
    weights, cut = importance_weights(tokens, settings.clip, settings.low)
    return Corrected(weights * tokens.advantage * tokens.logp, cut)


def clipped(tokens: SampledTokens, settings: Correction) -> Corrected:
    """PPO's clipping."""
    return pessimistic(torch.exp((tokens.logp - tokens.behaviour).clamp(max=_MOST)), tokens.advantage, settings)


def decoupled(tokens: SampledTokens, settings: Correction) -> Corrected:
    """Clipping around the proximal policy, weighted by the truncated ratio of proximal policy and sampler."""
    proximal = tokens.logp.detach() if tokens.proximal is None else tokens.proximal
    weights, above = importance_weights(tokens._replace(logp=proximal), settings.clip)
    made = pessimistic(torch.exp((tokens.logp - proximal).clamp(max=_MOST)), tokens.advantage, settings)
    return Corrected(weights * made.terms, made.cut | above, made.dual)


def sequence(tokens: SampledTokens, settings: Correction) -> Corrected:
    """GSPO in its token form."""
    means = _sequence_ratios(tokens, settings)
    return pessimistic(means * torch.exp(tokens.logp - tokens.logp.detach()), tokens.advantage, settings)


def sequence_masked(tokens: SampledTokens, settings: Correction) -> Corrected:
    """Truncated ratios of the sequences whose mean ratio is in the band."""
    means = _sequence_ratios(tokens, settings)
    outside = (means < settings.band.low) | (means > settings.band.high)
    weights, above = importance_weights(tokens, settings.clip)
    return Corrected(weights.masked_fill(outside, 0.0) * tokens.advantage * tokens.logp, outside | above)


def _sequence_ratios(tokens: SampledTokens, settings: Correction) -> Tensor:
    if tokens.lengths is None:
        raise ValueError(
            f"weighting {settings.weighting!r} needs the lengths of the sequences: set SampledTokens.lengths"
        )
    return geometric_means(tokens.logp.detach() - tokens.behaviour, tokens.lengths)
