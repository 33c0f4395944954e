"""The rate limit of an API key: a token bucket, refilled continuously, that permits bursts."""

import math
import time
from collections.abc import Callable


class RateLimit:
    """One bucket per name. A full bucket holds the requests of `burst_s` seconds."""

    def __init__(self, burst_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst_s, self._clock = burst_s, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, name: str, per_minute: int) -> float:
        """Count one request. Returns 0 if it is allowed, otherwise the seconds until the next one is allowed."""
        rate = per_minute / 60.0
        capacity = max(1.0, rate * self._burst_s)
        now = self._clock()
        tokens, last = self._buckets.get(name, (capacity, now))
        tokens = min(capacity, tokens + (now - last) * rate)
        if tokens < 1.0:
            self._buckets[name] = (tokens, now)
            return (1.0 - tokens) / rate
        self._buckets[name] = (tokens - 1.0, now)
        if len(self._buckets) > 10_000:
            self._forget(now)
        return 0.0

    def _forget(self, now: float) -> None:
        """Drop buckets that are full again: a new bucket is equal to them."""
        self._buckets = {name: entry for name, entry in self._buckets.items() if now - entry[1] < 2 * self._burst_s}


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
