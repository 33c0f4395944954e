"""Limits that keep tenants apart: the rate of an API key, a token bucket that is refilled continuously and permits
bursts; and the turns at once."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EACH_TENANT = 256
"""Turns at once of one tenant, those that wait for the engine included."""
ALL_TENANTS = 768
"""Of all tenants: fewer than the connections of the listener, so that other requests find one."""


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


class TurnsAtOnce:
    """Counts the turns under way."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @contextmanager
    def turn(self, tenant: str) -> Iterator[bool]:
        """A context around a turn of a tenant. False: there is no place for it, and it does not count."""
        allowed = self._of[tenant] < EACH_TENANT and self._of.total() < ALL_TENANTS
        self._of[tenant] += allowed
        try:
            yield allowed
        finally:
            self._of[tenant] -= allowed
            if not self._of[tenant]:
                del self._of[tenant]


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
