"""Delays of retry loops: they grow to a bound, jitter stays in its range, and success begins again."""

import pytest

from headrace.backoff import Backoff


def test_delays_grow_to_the_largest_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [round(backoff.next(), 6) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert (backoff.delay, backoff.next()) == (0.1, 0.1)


def test_jitter_stays_in_its_range_and_varies() -> None:
    delays = [Backoff(1.0, 1.0, jitter=0.5).next() for _ in range(200)]
    assert all(0.5 <= delay <= 1.5 for delay in delays) and len(set(delays)) > 100


@pytest.mark.parametrize("values", [(0.0, 1.0), (2.0, 1.0)])
def test_delays_without_a_meaning_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected 0 < first_s <= most_s"):
        Backoff(*values)
