"""The fit of pass rate over compute, against values worked out by hand."""

import math

import pytest

from benchmarks.scaling import Point, fitted


def points(*rates: float) -> list[Point]:
    """Version 0 without compute, then versions with 10, 100, ... operations."""
    return [Point(version, version, 10.0**version if version else 0.0, rate) for version, rate in enumerate(rates)]


def test_a_line_over_log_compute_is_found_without_version_0() -> None:
    line = fitted(points(0.9, 0.3, 0.5, 0.7))
    assert math.isclose(line.slope, 0.2) and math.isclose(line.intercept, 0.1)
    assert max(map(abs, line.residuals)) < 1e-12 and line.r2 is not None and math.isclose(line.r2, 1.0)


def test_residuals_and_the_slope_error_follow_from_the_points() -> None:
    # x = 1, 2, 3 and y = 0, 1, 0: slope 0, intercept 1/3, residuals -1/3, 2/3, -1/3.
    line = fitted(points(0.0, 0.0, 1.0, 0.0))
    assert math.isclose(line.slope, 0.0, abs_tol=1e-12) and line.r2 is not None and abs(line.r2) < 1e-12
    assert line.residuals == pytest.approx((-1 / 3, 2 / 3, -1 / 3))
    assert line.slope_error == pytest.approx(math.sqrt(6 / 9 / 1 / 2))
    assert fitted(points(0.0, 0.5, 0.5, 0.5)).r2 is None


def test_one_version_with_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two versions"):
        fitted(points(0.1, 0.2))
