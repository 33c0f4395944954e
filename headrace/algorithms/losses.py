"""The policy-gradient objective over sampled tokens: Dr. GRPO with a correction for the sampler's age.

The idea: the tokens were drawn by the sampler, a step or two old and perhaps with other rounding. What they still teach
is `corrections`' business: by default each token's gradient is weighted by p_trainer / p_sampler, cut at `clip`,
without a gradient through the weight itself. One pass over fresh samples (single epoch) needs no more, because the
trainer's own policy has not moved within it.

The sum over tokens is divided by one constant (sequences x a fixed token count), never by each sequence's length: with
1/length, long wrong answers are punished less per token than short ones (Dr. GRPO, arXiv 2503.20783).

KL to a reference policy is the k1 estimator as Composer 2 reports (arXiv 2603.24477): k3's variance explodes as the
policies part. It enters as a cost on each token's advantage; as a plain loss term k1's gradient is zero in expectation
(Tang & Munos, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477).

Layout: flat vectors over the M sampled tokens of a micro-batch; everything in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headrace.algorithms.corrections import Band, Weighting, corrected


class TokenLoss(NamedTuple):
    """The objective of some tokens: `loss` carries the gradient; `clipped` counts tokens whose weight was cut."""

    loss: Tensor
    clipped: Tensor


def policy_gradient(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    *,
    divisor: float,
    clip: float = 2.0,
    weighting: Weighting = "truncated",
    low: float = 0.0,
    reference: Tensor | None = None,
    kl_weight: float = 0.0,
    band: Band | None = None,
    proximal: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> TokenLoss:
    """-sum of the corrected terms / divisor over M sampled tokens; minimising it raises the reward.

    logp: float32 [M] with gradient; behaviour, advantage: float32 [M]; reference: float32 [M] log-probabilities of the
    reference policy, needed when kl_weight > 0. divisor: sequences of the whole batch x constant_tokens, the same for
    all its micro-batches, so that their sum is the batch's loss. The rest as in `corrections.corrected`.
    """
    if kl_weight > 0.0:
        if reference is None:
            raise ValueError("kl_weight > 0 needs the reference policy's log-probabilities")
        advantage = advantage - kl_weight * (logp.detach() - reference)
    terms, cut = corrected(
        logp, behaviour, advantage, weighting, clip=clip, low=low, band=band, proximal=proximal, lengths=lengths
    )
    return TokenLoss(-terms.sum() / divisor, cut.sum())


def dr_grpo_divisor(sequences: int, constant_tokens: int) -> float:
    """The constant divisor: every trajectory of the batch counts, also those whose group has no advantage."""
    if sequences < 1 or constant_tokens < 1:
        raise ValueError("the divisor needs at least one sequence and one token")
    return float(sequences * constant_tokens)
