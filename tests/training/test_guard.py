import math

import pytest

from headrace.training.guard import refusal


@pytest.mark.parametrize(
    ("loss", "norm", "k1", "reason"),
    [
        (0.1, 1.0, 0.01, ""),
        (math.nan, 1.0, 0.0, "loss_not_finite"),
        (0.1, math.inf, 0.0, "gradient_not_finite"),
        (0.1, 1.0, math.nan, "mismatch_not_finite"),
        (0.1, 51.0, 0.0, "gradient_spike"),
        (0.1, 1.0, -0.6, "mismatch_too_large"),
    ],
)
def test_reasons(loss: float, norm: float, k1: float, reason: str) -> None:
    assert refusal(loss, norm, k1, max_gradient_norm=50.0, max_k1=0.5) == reason


def test_zero_is_no_limit() -> None:
    assert refusal(0.1, 1e9, 9.0) == ""
