"""How many clones of a template should be parked: as many as a recent burst acquired.

The next burst is expected to need as many clones as the last: the machines of a batch's groups, then the judge's. So
the number for a template follows the most clones that were acquired within SPAN_S, about as long as making them would
take, and a burst is forgotten after MEMORY_S. A template without demand keeps the number that the configuration gives.

Trade-off: a parked clone costs 25 MiB, and the CPU time that its acquire would have spent. So the number is bounded
(`WARM_MOST`), and parked clones are ended whenever their memory is needed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

SPAN_S = 1.0
MEMORY_S = 60.0
FILL_AFTER_S, FILL_BY_S = 0.05, 0.5
"""Prewarming waits until acquires pause for the first time, at most the second, so that it does not compete with them
for the processor."""


class Demand:
    """least: clones that are always parked, by template; most: bound for a template, however large its bursts."""

    def __init__(self, least: Mapping[str, int], most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._most = most
        self._now = now
        self._taken: dict[str, deque[float]] = {}

    def took(self, template: str) -> None:
        """Record that a clone is acquired now, parked or not."""
        self._taken.setdefault(template, deque()).append(self._now())

    def wanted(self, template: str) -> int:
        """The number of clones of a template to park."""
        least = self._least.get(template, 0)
        return max(least, min(self._most, self._burst(template)))

    def templates(self) -> Iterable[str]:
        """Templates of which any clone should be parked."""
        return [name for name in {**self._least, **self._taken} if self.wanted(name)]

    def _burst(self, template: str) -> int:
        times = self._taken.get(template, deque[float]())
        while times and times[0] < self._now() - MEMORY_S:
            times.popleft()
        largest = first = 0
        for last, at in enumerate(times):
            while times[first] < at - SPAN_S:
                first += 1
            largest = max(largest, last - first + 1)
        return largest
