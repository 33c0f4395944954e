"""The policy-gradient objective over sampled tokens: Dr. GRPO with a correction for the sampler's age.

The idea: the sampler drew the tokens with weights that are a step or two old, and perhaps with other rounding.
`corrections` gives the weight of each token: by default its gradient is weighted by p_trainer / p_sampler, cut at
`clip`, without a gradient through the weight itself. One pass over fresh samples (a single epoch) needs no other
correction, because the trainer's policy does not change within it.

The sum over tokens is divided by one constant for the whole batch, never by each sequence's length: with 1/length, long
wrong answers are punished less per token than short ones (Dr. GRPO, arXiv 2503.20783). The constant is sequences x a
fixed token count, or the batch's number of sampled tokens (DAPO, arXiv 2503.14476), which suits long trajectories.
`sequence_mean` is the exception, because GSPO (arXiv 2507.18071) and GRPO are defined by it: each sequence's terms are
averaged over its own tokens, and the divisor is the batch's number of sequences.

KL to a reference policy is by default the k1 estimator, as in Composer 2 (arXiv 2603.24477): k3's variance explodes as
the policies diverge. It is a cost on each token's advantage; as a plain loss term k1's gradient is zero in expectation
(Tang & Munos, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477). k3 is the loss term
of GRPO (arXiv 2402.03300): exp(d) - 1 - d with d = log p_reference - log p, differentiated directly.

Layout: flat vectors over the M sampled tokens of a micro-batch; everything in float32.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.corrections import Corrected, Correction, SampledTokens
from headrace.algorithms.registry import LOSSES
from headrace.registry import PluginError

OPTIONS = "algorithm.options.loss"
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,63}")


class TokenLoss(NamedTuple):
    """The objective of some tokens: `loss` (0-dim) has the gradient; `clipped` (0-dim) counts the tokens that were
    cut, `dual_clipped` (0-dim) the ones that dual clip bounds; `metrics` (float64, 0-dim each) are the loss's own,
    summed over the tokens."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    metrics: Mapping[str, Tensor] = {}


class Objective(NamedTuple):
    """The settings of the loss of a batch's tokens."""

    correction: Correction = Correction()
    kl_weight: float = 0.0
    kl: Literal["k1", "k3"] = "k1"
    sequence_mean: bool = False
    """Whether each term is also divided by the number of tokens of its sequence."""
    divisor: float = 1.0
    """The same for all micro-batches of a batch, so that their losses add up to the batch's; see `batch_divisor`."""


def policy_gradient(tokens: SampledTokens, objective: Objective) -> TokenLoss:
    """-sum of the corrected terms / divisor over M sampled tokens; minimising it raises the reward.

    ValueError when kl_weight > 0 and `tokens` has no `reference`, and for a mean over sequences without their lengths.
    PluginError for an unknown weighting, and for terms or metrics that are not one number for each token.
    """
    penalty = None
    if objective.kl_weight > 0.0:
        if tokens.reference is None:
            raise ValueError(
                "kl_weight > 0 needs the reference policy's log-probabilities: set SampledTokens.reference"
            )
        if objective.kl == "k3":
            gap = tokens.reference - tokens.logp
            penalty = objective.kl_weight * (torch.expm1(gap) - gap)
        else:
            cost = objective.kl_weight * (tokens.logp.detach() - tokens.reference)
            tokens = tokens._replace(advantage=tokens.advantage - cost)
    correction = objective.correction
    corrected = LOSSES.bound(correction.weighting, correction.options, OPTIONS)(tokens, correction)
    _check(corrected, tokens, correction.weighting)
    terms, cut, dual, figures = corrected
    if penalty is not None:
        terms = terms - penalty
    if objective.sequence_mean:
        if tokens.lengths is None or sum(tokens.lengths) != len(terms):
            raise ValueError(f"a mean over sequences needs lengths of {len(terms)} tokens in all, got {tokens.lengths}")
        counts = torch.tensor(tokens.lengths, device=terms.device)
        terms = terms / counts.repeat_interleave(counts)
    metrics = {name: values.detach().double().sum() for name, values in figures.items()}
    bounded = cut.new_zeros(()) if dual is None else dual.sum()
    return TokenLoss(-terms.sum() / objective.divisor, cut.sum(), bounded, metrics)


def _check(made: Corrected, tokens: SampledTokens, name: str) -> None:
    """PluginError unless a loss gives its terms and metrics for each token."""
    for metric in made.metrics:
        if not _METRIC.fullmatch(metric):
            raise PluginError(
                f"loss {name!r}: a metric's name has lower-case letters, digits and _, got {metric!r:.100}"
            )
    for part, values in (("terms", made.terms), *made.metrics.items()):
        if values.shape != tokens.logp.shape:
            raise PluginError(f"loss {name!r}: {part} has shape {list(values.shape)}, not one number for each token")


def batch_divisor(sequences: int, constant_tokens: int, tokens: int) -> float:
    """The constant divisor of a batch: sequences x constant_tokens, or `tokens` where constant_tokens is 0.

    sequences, tokens: all trajectories of the batch and all their sampled tokens, also those without an advantage.
    """
    if sequences < 1 or constant_tokens < 0 or tokens < 0:
        raise ValueError(
            f"expected at least one sequence and counts >= 0, got {sequences} sequences, constant_tokens "
            f"{constant_tokens}, {tokens} tokens"
        )
    return float(sequences * constant_tokens if constant_tokens else max(1, tokens))
