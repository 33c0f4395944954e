"""Delays between repeated attempts: they grow by a factor from a first to a largest one, with jitter on request.

Every retry loop of the package uses this class, so that all of them have the same shape and a bound. Jitter spreads
callers that failed at the same moment; where a single caller retries, none is needed.
"""

import asyncio
import random


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
