import math

import pytest
import torch

from headrace.algorithms.corrections import SampledTokens
from headrace.algorithms.losses import Objective, batch_divisor, policy_gradient


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_on_policy_gradient_is_minus_advantage_over_the_divisor() -> None:
    logp = logs(0.5, 0.25, 0.1).requires_grad_()
    out = policy_gradient(SampledTokens(logp, logp.detach(), torch.tensor([0.75, -0.25, 0.0])), Objective(divisor=8.0))
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert gradient.tolist() == [-0.75 / 8, 0.25 / 8, 0.0]
    assert out.loss.item() == pytest.approx(-(0.75 * math.log(0.5) - 0.25 * math.log(0.25)) / 8)
    assert int(out.clipped) == 0


def test_no_gradient_flows_through_the_weight() -> None:
    logp = logs(0.4).requires_grad_()
    loss = policy_gradient(SampledTokens(logp, logs(0.8), torch.tensor([1.0])), Objective()).loss
    assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(
        -0.5
    )  # -w; with a gradient through w it would be -w (1 + log p)


def test_k1_is_a_cost_on_the_advantage() -> None:
    logp = logs(0.5, 0.5).requires_grad_()
    reference = logs(0.25, 1.0)  # twice as likely as under the reference, half as likely
    out = policy_gradient(
        SampledTokens(logp, logp.detach(), torch.zeros(2), reference=reference), Objective(kl_weight=0.1)
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)
    # Descent lowers the first probability and raises the second.
    assert gradient.tolist() == pytest.approx([0.1 * math.log(2), -0.1 * math.log(2)])
    with pytest.raises(ValueError, match="reference"):
        policy_gradient(SampledTokens(logp, logp.detach(), torch.zeros(2)), Objective(kl_weight=0.1))


def test_micro_batches_add_up_to_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, behaviour, advantage = (torch.randn(10, generator=generator) for _ in range(3))
    whole = policy_gradient(SampledTokens(logp, behaviour, advantage), Objective(divisor=20.0)).loss
    parts = [
        policy_gradient(SampledTokens(logp[s], behaviour[s], advantage[s]), Objective(divisor=20.0)).loss
        for s in (slice(4), slice(4, 10))
    ]
    assert float(parts[0] + parts[1]) == pytest.approx(float(whole), rel=1e-6)


def test_the_divisor_is_the_same_for_long_and_short_sequences() -> None:
    assert batch_divisor(64, 48, tokens=100_000) == 3072.0
    with pytest.raises(ValueError, match="at least one"):
        batch_divisor(0, 48, tokens=1)


def test_a_divisor_of_sampled_tokens_grows_with_the_lengths() -> None:
    assert [batch_divisor(64, 0, tokens) for tokens in (0, 1_000, 100_000)] == [1.0, 1_000.0, 100_000.0]


def test_k3_is_a_loss_term_with_its_own_gradient() -> None:
    logp = logs(0.5, 0.5).requires_grad_()
    objective = Objective(kl_weight=0.1, kl="k3", divisor=2.0)
    out = policy_gradient(
        SampledTokens(logp, logp.detach(), torch.zeros(2), reference=logs(0.25, 1.0)), objective
    )  # reference / policy: 1/2 and 2
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert out.loss.item() == pytest.approx(0.05 * ((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))))
    assert gradient.tolist() == pytest.approx([0.05 * (1 - 0.5), 0.05 * (1 - 2.0)])


def test_a_mean_over_each_sequence_weighs_sequences_alike() -> None:
    logp = logs(0.5, 0.5, 0.5, 0.2).requires_grad_()
    tokens = SampledTokens(logp, logp.detach(), torch.tensor([1.0, 1.0, 1.0, -1.0]), lengths=(3, 1))
    objective = Objective(sequence_mean=True, divisor=2.0)
    (gradient,) = torch.autograd.grad(policy_gradient(tokens, objective).loss, logp)
    assert gradient.tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 1 / 2])
    with pytest.raises(ValueError, match="lengths of 4 tokens"):
        policy_gradient(tokens._replace(lengths=(3,)), objective)
