"""The gate's tests: valid at every look, and sensitive to what they look for."""

import random

from headrace.algorithms.sequential import always_valid_p, naive_p


def first_alarm(test, rng: random.Random, rate_a: float, rate_b: float, looks: int = 60) -> int:  # type: ignore[no-untyped-def]
    """The look at which b is found to be worse, -1 for none. 50 sessions between two looks."""
    up_a = up_b = 0
    for look in range(1, looks + 1):
        up_a += sum(rng.random() < rate_a for _ in range(25))
        up_b += sum(rng.random() < rate_b for _ in range(25))
        if test(up_a, 25 * look, up_b, 25 * look) <= 0.05:
            return look
    return -1


def test_equal_versions_are_rarely_told_apart_however_often_one_looks() -> None:
    rng = random.Random(1)
    valid = sum(first_alarm(always_valid_p, rng, 0.7, 0.7) > 0 for _ in range(300)) / 300
    naive = sum(first_alarm(naive_p, rng, 0.7, 0.7) > 0 for _ in range(300)) / 300
    assert valid <= 0.05 < 0.12 < naive


def test_a_worse_version_is_found() -> None:
    rng = random.Random(2)
    looks = [first_alarm(always_valid_p, rng, 0.7, 0.5) for _ in range(50)]
    assert sum(look > 0 for look in looks) >= 48


def test_an_empty_arm_and_a_better_version_are_no_harm() -> None:
    assert always_valid_p(0, 0, 0, 10) == always_valid_p(5, 10, 0, 0) == 1.0
    assert always_valid_p(50, 100, 90, 100) == 1.0
    assert always_valid_p(90, 100, 50, 100) < 1e-4
