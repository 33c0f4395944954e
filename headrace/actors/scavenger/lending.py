"""The rule by which one rollout actor of the product is lent and reclaimed: grow slowly, shrink at once.

The idea: users must not notice lending. The first request above `reclaim_above` reclaims. The actor is lent when three
things hold: the load has been low for `lend_after_s`; a reclaim is at least `lend_again_s` ago, so that users meet a
lent actor at most once in this time; and neither the mean load of the last `forecast_s` nor the line through these
loads, extended over the same time, is above `reclaim_above`. The mean detects short requests with pauses between them;
the line detects a load that rises slowly, as in the morning. Trade-off: capacity that could be lent stays idle for a
while.
"""

from collections import deque
from typing import NamedTuple

from headrace.config import Production

ROUNDING = 1e-6
"""In requests. Rounding moves the line through equal loads by less than this."""


class Point(NamedTuple):
    """A load and its time in seconds."""

    at: float
    load: int


class Trend:
    """The straight line through the loads of the last `window_s` seconds, by least squares."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: deque[Point] = deque()

    def add(self, load: int, now: float) -> None:
        """Add a load. Times do not decrease."""
        self._points.append(Point(now, load))
        # One point from before the window stays, so that the loads cover all of it.
        while len(self._points) > 1 and now - self._points[1].at >= self._window_s:
            self._points.popleft()

    def expected(self, now: float) -> float | None:
        """The mean load, or the line's load `window_s` from now if that is higher; None until the loads cover the
        window."""
        first = self._points[0].at
        if now - first < self._window_s:
            return None
        count = len(self._points)
        mean_at = sum(point.at for point in self._points) / count
        mean_load = sum(point.load for point in self._points) / count
        spread = sum((point.at - mean_at) ** 2 for point in self._points)
        if spread == 0.0:
            return mean_load
        slope = sum((point.at - mean_at) * (point.load - mean_load) for point in self._points) / spread
        return max(mean_load, mean_load + slope * (now + self._window_s - mean_at))


class Lending:
    """The rule for one rollout actor. `lent` says whether it is lent."""

    def __init__(self, rules: Production) -> None:
        self._rules = rules
        self._trend = Trend(rules.forecast_s)
        self._quiet_since: float | None = None
        self._reclaimed_at: float | None = None
        self.lent = False
        self.reason = ""
        """Of the last change."""

    def observe(self, load: int, now: float, *, may_lend: bool = True) -> bool:
        """Apply a report: the load of all its sources, and the time in seconds; True when `lent` changed.

        may_lend: nothing else forbids lending now."""
        self._trend.add(load, now)
        if load > self._rules.reclaim_above:
            self._quiet_since = None
            if not self.lent:
                return False
            self._reclaimed_at = now
            return self._set(False, f"load {load}, more than {self._rules.reclaim_above}")
        if self._quiet_since is None:
            self._quiet_since = now
        quiet_s = now - self._quiet_since
        if self.lent or not may_lend or quiet_s < self._rules.lend_after_s or not self._settled(now):
            return False
        expected = self._trend.expected(now)
        if expected is None or expected > self._rules.reclaim_above + ROUNDING:
            return False
        return self._set(True, f"load at most {self._rules.reclaim_above} for {quiet_s:.0f} s, {expected:.2f} expected")

    def undo(self) -> None:
        """Take back the last change, which could not be written."""
        self.lent = not self.lent

    def _settled(self, now: float) -> bool:
        """Whether the last reclaim is long enough ago."""
        return self._reclaimed_at is None or now - self._reclaimed_at >= self._rules.lend_again_s

    def _set(self, lent: bool, reason: str) -> bool:
        self.lent, self.reason = lent, reason
        return True
