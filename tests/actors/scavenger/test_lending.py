"""The rule of lending, over invented loads and times: it grows slowly, shrinks at once, and sees a rise coming."""

import itertools
import math

import pytest

from headrace.actors.scavenger.lending import Lending, Trend
from headrace.config import Production


def rules(above: int = 0, after: float = 3.0, again: float = 600.0, forecast: float = 0.0) -> Production:
    return Production(reclaim_above=above, lend_after_s=after, lend_again_s=again, forecast_s=forecast)


def changes(lending: Lending, loads: list[int], start: float = 0.0) -> list[float]:
    """The times at which the actor was lent or reclaimed, with a report a second."""
    return [start + at for at, load in enumerate(loads) if lending.observe(load, start + at)]


def test_lends_after_a_quiet_time_and_reclaims_at_once() -> None:
    lending = Lending(rules())
    assert changes(lending, [1, 0, 0, 0, 0, 0]) == [4] and lending.lent
    assert changes(lending, [1], 6) == [6] and not lending.lent
    assert changes(lending, [0] * 700, 7) == [606], "the same capacity is lent again after ten minutes"


def test_a_change_that_was_not_written_is_decided_again() -> None:
    lending = Lending(rules(after=0.0))
    assert lending.observe(0, 0.0, may_lend=False) is False
    assert lending.observe(0, 1.0)
    lending.undo()
    assert lending.observe(0, 2.0) and lending.lent
    assert lending.observe(1, 3.0)
    lending.undo()
    assert lending.observe(1, 4.0) and not lending.lent


def test_a_rise_a_trickle_and_the_time_after_a_start_are_not_lent() -> None:
    assert changes(Lending(rules(10, forecast=60.0)), [at // 10 for at in range(100)]) == [], "10 lies just ahead"
    assert changes(Lending(rules(forecast=60.0)), [int(at % 30 == 0) for at in range(600)]) == []
    assert changes(Lending(rules(forecast=60.0)), [0] * 100) == [60]
    falling = [max(0, 20 - at // 5) for at in range(200)]
    assert changes(Lending(rules(5, forecast=60.0)), falling) == [108], "a falling load is lent once it is low"


@pytest.mark.parametrize("slope", [0.0, 0.5, -0.25])
def test_the_trend_is_the_line_through_the_loads(slope: float) -> None:
    trend = Trend(20.0)
    for at in range(100):
        trend.add(round(100 + slope * 4 * (at // 4)), float(at))
    expected = trend.expected(99.0)
    assert expected is not None
    assert math.isclose(expected, 100 + slope * (99 + (20 if slope > 0 else -10)), abs_tol=2.0)


def test_a_diurnal_day_lends_once_and_every_return_has_its_reason() -> None:
    """Ten minutes of a day's clock pass between two lendings, whatever the load does."""
    lending = Lending(rules(2, after=60.0, forecast=600.0))
    moments = []
    for minute in range(2 * 24 * 60):
        phase = 2 * math.pi * minute / (24 * 60)
        load = round(max(0.0, 20 * (0.4 - math.cos(phase)))) + (3 if minute % 97 == 0 else 0)
        if lending.observe(load, 60.0 * minute) and lending.lent:
            moments.append(60.0 * minute)
    assert 2 <= len(moments) <= 16
    assert all(later - earlier >= 600.0 for earlier, later in itertools.pairwise(moments))
