"""How many clones of a template should wait ready: as many as were lately taken at one time.

What a burst took once the next one takes: the eight machines of a batch's groups, the judge's after them. So the stock
of a template follows the most clones that were taken within SPAN_S, about what making them anew would last, and
forgets a burst after MEMORY_S. A template that nobody asks for any more keeps what the configuration says, or nothing.

Trade-off: a clone that waits costs 25 MiB and the CPU time of its making, which whoever takes it would have spent. So
the stock is bounded (`warm_most`), and makes way whenever its memory is wanted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

SPAN_S = 1.0
MEMORY_S = 60.0


class Demand:
    """least: clones that always wait, by template. most: of a template, however large its bursts."""

    def __init__(self, least: Mapping[str, int], most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._most = most
        self._now = now
        self._taken: dict[str, deque[float]] = {}

    def took(self, template: str) -> None:
        """A clone was taken now, whether one waited or not."""
        self._taken.setdefault(template, deque()).append(self._now())

    def wanted(self, template: str) -> int:
        """How many should wait."""
        least = self._least.get(template, 0)
        return max(least, min(self._most, self._burst(template)))

    def templates(self) -> Iterable[str]:
        """Those of which any should wait."""
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
