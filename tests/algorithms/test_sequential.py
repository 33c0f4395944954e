"""The gate's harm test: it holds its level at every look, rate and share, and it finds harm."""

import math

import numpy as np
import pytest

from headrace.algorithms.sequential import log_evidence, p_value

LEVEL = 0.025
RATES = (0.5, 0.7, 0.9, 0.95, 0.98, 0.99)
SHARES = (0.01, 0.05, 0.25, 0.5)


def crossings(rate: float, harm: float, share: float, sessions: int, runs: int, seed: int) -> int:
    """In how many runs the test ever rejects at `LEVEL`; it looks after every failure, where evidence of harm grows.

    sessions: of both arms together. The candidate succeeds with probability rate - harm.
    """
    rng, rejected = np.random.default_rng(seed), 0
    for _ in range(runs):
        treated = rng.random(sessions) < share
        up = rng.random(sessions) < np.where(treated, rate - harm, rate)
        n_b, n_a = np.cumsum(treated), np.cumsum(~treated)
        up_b, up_a = np.cumsum(treated & up), np.cumsum(~treated & up)
        looks = np.flatnonzero(treated & ~up)
        looks = looks[:: max(1, len(looks) // 60)]
        rejected += any(
            p_value(log_evidence(int(up_a[k]), int(n_a[k]), int(up_b[k]), int(n_b[k]), share)) <= LEVEL for k in looks
        )
    return rejected


def allowed(runs: int) -> float:
    """Rejections in `runs` runs of a valid test: three standard errors above the level."""
    return LEVEL * runs + 3 * math.sqrt(LEVEL * (1 - LEVEL) * runs)


def test_equal_versions_are_rarely_told_apart_however_often_one_looks() -> None:
    assert crossings(0.95, 0.0, 0.1, 1000, 150, 1) <= allowed(150)


def test_harm_of_ten_points_is_found() -> None:
    assert crossings(0.9, 0.1, 0.25, 1600, 40, 2) >= 0.9 * 40


def test_one_bad_first_rating_is_no_evidence() -> None:
    for share in SHARES:
        control = round((1 - share) / share)
        assert p_value(log_evidence(control, control, 0, 1, share)) > 0.5 * share


@pytest.mark.parametrize("share", SHARES)
def test_the_e_value_of_one_session_is_one_on_average_between_equal_versions(share: float) -> None:
    for rate in RATES:
        average = sum(
            chance * math.exp(log_evidence(*counts, share))
            for chance, counts in (
                ((1 - share) * rate, (1, 1, 0, 0)),
                ((1 - share) * (1 - rate), (0, 1, 0, 0)),
                (share * rate, (0, 0, 1, 1)),
                (share * (1 - rate), (0, 0, 0, 1)),
            )
        )
        assert average == pytest.approx(1.0, abs=1e-12)


def test_nothing_is_compared_without_two_arms() -> None:
    assert log_evidence(0, 0, 0, 10, 1.0) == log_evidence(5, 10, 0, 0, 0.0) == log_evidence(0, 0, 0, 0, 0.5) == 0.0
    assert log_evidence(50, 100, 90, 100, 0.5) < 0 < log_evidence(90, 100, 50, 100, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("rate", RATES)
def test_the_level_holds_at_every_rate_and_share(rate: float, share: float) -> None:
    assert crossings(rate, 0.0, share, int(min(200 / share, 4000)), 2000, 3) <= allowed(2000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "share"), [(0.7, 0.05), (0.9, 0.05), (0.9, 0.25), (0.95, 0.25), (0.95, 0.5), (0.99, 0.5)]
)
def test_harm_of_ten_points_is_found_within_400_sessions_of_the_candidate(rate: float, share: float) -> None:
    """Other pairs lack the information: at a rate of .5 and a share of .5 a test of this level that looks once, after
    400 sessions of each arm, finds it in 82 % of runs."""
    assert crossings(rate, 0.1, share, int(400 / share), 400, 4) >= 0.9 * 400
