"""Each correction against numbers worked out by hand: its terms, its gradient, and what it cuts."""

import math

import pytest
import torch

from headrace.algorithms.corrections import (
    Band,
    Corrected,
    Correction,
    SampledTokens,
    geometric_means,
    importance_weights,
)
from headrace.algorithms.registry import LOSSES

BAND = Band(0.8, 1.2)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def slopes(
    weighting: str,
    logp: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: list[float],
    band: Band = BAND,
    proximal: torch.Tensor | None = None,
    lengths: list[int] | None = None,
    dual: float = 0.0,
) -> tuple[list[float], Corrected]:
    """d(sum of terms) / d(logp), and the terms."""
    logp = logp.clone().requires_grad_()
    tokens = SampledTokens(logp, behaviour, torch.tensor(advantage), proximal, lengths=lengths)
    made = LOSSES.get(weighting)(tokens, Correction(weighting, clip=2.0, low=0.5, band=band, dual=dual))
    (gradient,) = torch.autograd.grad(made.terms.sum(), logp)
    return gradient.tolist(), made


def test_truncation_keeps_small_ratios_and_cuts_large_ones() -> None:
    logp, behaviour = logs(0.5, 0.4, 0.9), logs(0.5, 0.8, 0.1)  # ratios 1, 0.5, 9
    weights, cut = importance_weights(SampledTokens(logp, behaviour, torch.zeros(3)), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.0])
    assert cut.tolist() == [False, False, True]
    gradient, made = slopes("truncated", logp, behaviour, [1.0, -1.0, 0.5])
    assert gradient == pytest.approx([1.0, -0.5, 1.0])  # w A, no gradient through w
    assert made.terms.tolist() == pytest.approx([math.log(0.5), -0.5 * math.log(0.4), math.log(0.9)])


def test_masking_drops_both_sides() -> None:
    logp, behaviour = logs(0.5, 0.1, 0.9, 0.3), logs(0.5, 0.8, 0.1, 0.2)  # ratios 1, 0.125, 9, 1.5
    gradient, made = slopes("masked", logp, behaviour, [1.0, 1.0, 1.0, -1.0])
    assert gradient == pytest.approx([1.0, 0.0, 0.0, -1.5])
    assert made.cut.tolist() == [False, True, True, False]


def test_clipping_stops_only_the_side_to_which_the_advantage_pushes() -> None:
    behaviour = logs(0.4, 0.4, 0.4, 0.4, 0.4)
    logp = logs(0.6, 0.6, 0.2, 0.2, 0.4)  # ratios 1.5, 1.5, 0.5, 0.5, 1
    gradient, made = slopes("clipped", logp, behaviour, [1.0, -1.0, 1.0, -1.0, 2.0])
    assert made.terms.tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8, 2.0])
    assert made.cut.tolist() == [True, False, False, True, False]
    assert gradient == pytest.approx([0.0, -1.5, 0.5, 0.0, 2.0])  # d(r A) = r A d(logp)


def test_dual_clip_bounds_a_negative_advantage_and_nothing_else() -> None:
    """max(min(r A, clip(r) A), c A) of Ye et al. for A < 0, with c = 3, worked out by hand; the gradient is autograd's
    of the formula itself."""
    behaviour = logs(0.1, 0.1, 0.1, 0.2, 0.4)
    logp = logs(0.8, 0.8, 0.29, 0.8, 0.2)  # ratios 8, 8, 2.9, 4, 0.5
    advantage = [-0.5, 0.5, -1.0, 0.0, -1.0]
    gradient, made = slopes("clipped", logp, behaviour, advantage, dual=3.0)
    assert made.terms.tolist() == pytest.approx([-1.5, 0.6, -2.9, 0.0, -0.8])
    assert gradient == pytest.approx([0.0, 0.0, -2.9, 0.0, 0.0])
    assert made.dual is not None and made.dual.tolist() == [True, False, False, False, False]
    assert made.cut.tolist() == [True, True, False, False, True], "the bounded token among them"
    leaf, signs = logp.clone().requires_grad_(), torch.tensor(advantage)
    ratio = torch.exp(leaf - behaviour)
    plain = torch.minimum(ratio * signs, ratio.clamp(0.8, 1.2) * signs)
    formula = torch.where(signs < 0, torch.maximum(plain, 3.0 * signs), plain)
    assert made.terms.tolist() == pytest.approx(formula.tolist())
    assert torch.autograd.grad(formula.sum(), leaf)[0].tolist() == pytest.approx(gradient)
    without, unbounded = slopes("clipped", logp, behaviour, advantage)
    assert without[0] == pytest.approx(-4.0) and unbounded.dual is None


def test_dual_clip_holds_an_unlikely_token_of_every_weighting_with_a_band() -> None:
    """A token at -14 nats for the sampler and -1 here: its share of the gradient was 442,413 times its advantage."""
    logp, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-14.0, -1.0])
    assert slopes("clipped", logp, behaviour, [-1.0, -1.0])[0][0] == pytest.approx(-math.exp(13.0), rel=1e-4)
    gradient, made = slopes("clipped", logp, behaviour, [-1.0, -1.0], dual=3.0)
    assert (gradient, made.terms.tolist()) == ([0.0, -1.0], [-3.0, -1.0])
    # Around the proximal policy, and under the truncated weight 2 of proximal policy and sampler.
    proximal = torch.tensor([-3.0, -1.0])  # u: e^2, 1
    gradient, made = slopes("decoupled", logp, behaviour, [-1.0, -1.0], proximal=proximal, dual=3.0)
    assert (gradient, made.terms.tolist()) == ([0.0, -1.0], [-6.0, -1.0])
    assert made.dual is not None and made.dual.tolist() == [True, False]
    # A sequence as a whole: e^6.5 for both tokens of the first, 1 for the second.
    logp, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-14.0, -1.0, -1.0])
    gradient, made = slopes("sequence", logp, behaviour, [-1.0] * 3, lengths=[2, 1], dual=3.0)
    assert (gradient, made.terms.tolist()) == ([0.0, 0.0, -1.0], [-3.0, -3.0, -1.0])


@pytest.mark.parametrize("weighting", ["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"])
def test_a_ratio_beyond_every_number_leaves_the_other_tokens_their_gradient(weighting: str) -> None:
    """Tokens at -200 nats for the sampler: the ratio is infinite in float32."""
    logp, behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-200.0, -200.0, -200.0, -1.0])
    made = slopes(weighting, logp, behaviour, [1.0, -1.0, 0.0, 0.5], proximal=behaviour, lengths=[1] * 4, dual=3.0)
    assert made[1].terms.isfinite().all() and all(map(math.isfinite, made[0])), made
    assert made[0][2:] == [0.0, 0.5]


def test_the_decoupled_objective_clips_around_the_proximal_policy_not_the_sampler() -> None:
    behaviour, proximal = logs(0.1, 0.5, 0.5), logs(0.3, 0.4, 0.4)  # p_prox / p_behaviour: 3, 0.8, 0.8
    logp = logs(0.3, 0.6, 0.44)  # u: 1, 1.5, 1.1
    gradient, made = slopes("decoupled", logp, behaviour, [1.0, 1.0, -1.0], proximal=proximal)
    assert made.terms.tolist() == pytest.approx([2.0 * 1.0, 0.8 * 1.2, 0.8 * -1.1])
    assert made.cut.tolist() == [True, True, False], "one by the truncated weight, one by the band"
    assert gradient == pytest.approx([2.0, 0.0, 0.8 * -1.1])
    # `clipped` would have cut the first, for the sampler's age alone.
    assert slopes("clipped", logp, behaviour, [1.0, 1.0, -1.0])[0][0] == 0.0


def test_before_the_first_update_decoupled_is_truncated() -> None:
    logp, behaviour = logs(0.5, 0.4, 0.9), logs(0.5, 0.8, 0.1)
    advantage = [0.3, -0.7, 1.0]
    one, _ = slopes("decoupled", logp, behaviour, advantage)
    assert one == pytest.approx(slopes("truncated", logp, behaviour, advantage)[0])
    assert one == slopes("decoupled", logp, behaviour, advantage, proximal=logp)[0]


def test_geometric_means_are_per_sequence() -> None:
    means = geometric_means(logs(2.0, 0.5, 4.0, 9.0), [2, 0, 1, 1])
    assert means.tolist() == pytest.approx([1.0, 1.0, 4.0, 9.0])
    assert geometric_means(torch.empty(0), []).tolist() == []
    with pytest.raises(ValueError, match="expected sequences of 4 tokens in all, got 3"):
        geometric_means(logs(1, 1, 1, 1), [2, 1])


def test_a_sequence_is_clipped_as_a_whole() -> None:
    behaviour = logs(0.2, 0.2, 0.2, 0.2, 0.2)
    logp = logs(0.4, 0.2, 0.1, 0.4, 0.2)  # ratios 2, 1 | 0.5, 2 | 1 -> geometric means sqrt(2), 1, 1
    gradient, made = slopes("sequence", logp, behaviour, [1.0, 1.0, -1.0, -1.0, 0.5], lengths=[2, 2, 1])
    assert made.terms.tolist() == pytest.approx([1.2, 1.2, -1.0, -1.0, 0.5])
    assert made.cut.tolist() == [True, True, False, False, False]
    assert gradient == pytest.approx([0.0, 0.0, -1.0, -1.0, 0.5])
    falling, _ = slopes("sequence", logp, behaviour, [-1.0] * 5, lengths=[2, 2, 1])
    assert falling == pytest.approx([-math.sqrt(2), -math.sqrt(2), -1.0, -1.0, -1.0])  # s A on each of its tokens


def test_a_sequence_far_off_policy_teaches_nothing() -> None:
    behaviour = logs(0.2, 0.2, 0.2, 0.2)
    logp = logs(0.4, 0.3, 0.1, 0.4)  # means sqrt(3) and 1
    gradient, made = slopes("sequence_masked", logp, behaviour, [-1.0, 1.0, 1.0, 1.0], lengths=[2, 2])
    assert gradient == pytest.approx([0.0, 0.0, 0.5, 2.0])
    assert made.cut.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="needs the lengths"):
        slopes("sequence_masked", logp, behaviour, [1.0] * 4)


@pytest.mark.parametrize("weighting", ["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"])
def test_on_policy_all_of_them_are_the_plain_gradient(weighting: str) -> None:
    logp = logs(0.5, 0.25, 0.1)
    gradient, made = slopes(weighting, logp, logp, [0.75, -0.25, 0.0], lengths=[1, 2])
    assert gradient == [0.75, -0.25, 0.0]
    assert not made.cut.any()
