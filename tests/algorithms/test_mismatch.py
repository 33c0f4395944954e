import math

import pytest
import torch

from headrace.algorithms.mismatch import mismatch, router_flips


def test_equal_numbers_give_zero() -> None:
    logp = torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert mismatch(logp, logp.clone()) == (100, 0.0, 0.0, 0.0, 0.0)
    assert mismatch(torch.empty(0), torch.empty(0)) == (0, 0.0, 0.0, 0.0, 0.0)


def test_values_by_hand() -> None:
    sampler = torch.log(torch.tensor([0.5, 0.5]))
    trainer = torch.log(torch.tensor([0.25, 0.5]))
    divergence = mismatch(trainer, sampler)
    assert divergence.k1 == pytest.approx(math.log(2) / 2)
    assert divergence.k3 == pytest.approx((0.5 - 1 + math.log(2)) / 2)
    assert divergence.max_abs == pytest.approx(math.log(2))


def test_both_estimate_the_same_divergence() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    drawn = torch.multinomial(p, 400_000, replacement=True, generator=generator)
    divergence = mismatch(q.log()[drawn], p.log()[drawn])
    exact = float((p * (p / q).log()).sum())
    assert divergence.k1 == pytest.approx(exact, abs=2e-3)
    assert divergence.k3 == pytest.approx(exact, abs=5e-4)


def test_nan_is_not_hidden() -> None:
    divergence = mismatch(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]))
    assert math.isnan(divergence.k1)
    assert math.isnan(divergence.max_abs)


def test_flips_compare_sets_and_skip_missing_rows() -> None:
    left = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[-1, -1], [-1, -1]]])
    right = torch.tensor([[[1, 0], [2, 4]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]])
    assert router_flips(left, right) == 1 / 4
    assert router_flips(left[2:], right[2:]) == 0.0
    with pytest.raises(ValueError, match="shape"):
        router_flips(left, right[:2])


def test_the_share_that_differs_counts_one_bit_and_a_nan() -> None:
    logp = torch.linspace(-3, -1, 8)
    other = logp.clone()
    other[2] = torch.nextafter(other[2], torch.tensor(0.0))
    other[5] = torch.nan
    assert mismatch(logp, other).differ == 0.25
