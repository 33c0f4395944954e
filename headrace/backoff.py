"""Delays between repeated attempts: they grow by a factor from a first to a largest one, with jitter on request.

Every retry loop of the package uses this class, so that all of them have the same shape and a bound. Jitter spreads
callers that failed at the same moment; where a single caller retries, none is needed.
"""

import asyncio
import random
import time
from collections import deque


class Backoff:
    """The delays of one retry loop, in seconds."""

    def __init__(self, first_s: float, most_s: float, *, factor: float = 2.0, jitter: float = 0.0) -> None:
        """first_s: the first delay; most_s: the largest one; factor: growth per attempt; jitter: each delay is drawn
        between (1 - jitter) and (1 + jitter) times its nominal value."""
        if not (0 < first_s <= most_s and factor >= 1 and 0 <= jitter < 1):
            raise ValueError(
                f"expected 0 < first_s <= most_s, factor >= 1, 0 <= jitter < 1, got {first_s}, {most_s}, ..."
            )
        self._first, self._most, self._factor, self._jitter = first_s, most_s, factor, jitter
        self.delay = first_s
        """The nominal delay before the next attempt."""

    def next(self) -> float:
        """The delay before the next attempt; the one after it is larger."""
        delay = self.delay
        self.delay = min(self.delay * self._factor, self._most)
        return delay * random.uniform(1 - self._jitter, 1 + self._jitter) if self._jitter else delay

    def reset(self) -> None:
        """Begin again with the first delay, after an attempt that succeeded."""
        self.delay = self._first

    async def sleep(self) -> None:
        """Wait for the next attempt."""
        await asyncio.sleep(self.next())


class Intensity:
    """The restarts of a supervisor, as in OTP: at most `most` in `period_s` seconds, after pauses that grow."""

    def __init__(self, most: int, period_s: float) -> None:
        self.most, self.period_s = most, period_s
        self._moments: deque[float] = deque()

    def exceeded(self) -> bool:
        """Count a restart; True when there are too many."""
        now = time.monotonic()
        self._moments.append(now)
        while now - self._moments[0] > self.period_s:
            self._moments.popleft()
        return len(self._moments) > self.most

    def pause_s(self) -> float:
        """Seconds to wait before the next start."""
        return min(0.2 * len(self._moments), 2.0)
