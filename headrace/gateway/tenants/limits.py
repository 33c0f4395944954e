"""Limits that keep tenants apart, of one gateway: rates of API keys, token buckets that are refilled continuously and
permit bursts; the turns at once, which tenants that wait get in turns; and the order in which requests are taken up."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from headrace.gateway.http import HttpRefused

WAITING = 256
"""Turns of one tenant that wait for a place."""
WAIT_S = 60.0
"""The longest wait for a place."""


class RateLimit:
    """One bucket per name. A full bucket holds the amount of `burst_s` seconds."""

    def __init__(self, burst_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst_s, self._clock = burst_s, clock
        self._full: dict[str, float] = {}
        """When each bucket will be full again; one that is absent is full."""

    def take(self, name: str, per_minute: int) -> float:
        """Count one request. Returns 0 if it is allowed, otherwise the seconds until the next one is allowed."""
        if (wait_s := self.wait(name, per_minute, 1.0)) == 0.0:
            self.spend(name, per_minute, 1.0)
        return wait_s

    def wait(self, name: str, per_minute: int, least: float) -> float:
        """Seconds until a bucket holds this much; 0 if it does."""
        missing_s = self._full.get(name, 0.0) - self._clock()
        return max(0.0, max(0.0, missing_s) - max(self._burst_s, 60.0 / per_minute) + least * 60.0 / per_minute)

    def spend(self, name: str, per_minute: int, amount: float) -> None:
        """Take an amount out of a bucket, which may owe it afterwards."""
        now = self._clock()
        self._full[name] = max(self._full.get(name, 0.0), now) + amount * 60.0 / per_minute
        if len(self._full) > 10_000:
            self._full = {name: full for name, full in self._full.items() if full > now}


class Rounds:
    """Lets requests in by rounds: in each pass of the event loop, the oldest one of every tenant. A request of one
    tenant never waits behind the many that another one sent at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def enter(self, tenant: str) -> None:
        """Wait for the tenant's next round."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._next)
        place = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        await place

    def _next(self) -> None:
        for tenant, queue in [*self._waiting.items()]:
            while queue and (place := queue.popleft()).done():  # its client has left
                pass
            if not place.done():
                place.set_result(None)
            if not queue:
                del self._waiting[tenant]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class TurnsAtOnce:
    """Places for the turns that are sampled at once. One tenant gets at most three quarters of them, so another one
    finds a place at once; where several wait, each gets the next free place in turn."""

    def __init__(self, places: int) -> None:
        self._places, self._each = places, max(1, places * 3 // 4)
        self._of: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant; the one that waits longest for its next place comes first."""
        self._turn_s = 1.0
        """Seconds of a turn, on average over the last ones."""
        self._began: dict[object, float] = {}
        """When each turn under way began, the oldest first."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """A context around a turn of a tenant, which may wait for a place. HttpRefused with 429."""
        await self._place(tenant)
        self._began[turn := object()] = time.monotonic()
        try:
            yield
        finally:
            self._turn_s += 0.1 * (time.monotonic() - self._began.pop(turn) - self._turn_s)
            self._leave(tenant)

    async def _place(self, tenant: str) -> None:
        if self._free(tenant) and tenant not in self._waiting:
            self._of[tenant] += 1
            return
        self.refuse_full(tenant)
        queue = self._waiting.setdefault(tenant, deque())
        place = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            async with asyncio.timeout(WAIT_S):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._leave(tenant)
            else:
                self._drop(tenant, place)
            if isinstance(error, TimeoutError):
                text = f"no place for this turn within {WAIT_S:g} s; ask again when others have ended"
                raise HttpRefused(429, text, self._again_s(tenant)) from None
            raise

    def refuse_full(self, tenant: str) -> None:
        """Refuse a turn that finds no place to wait, before its body is read. HttpRefused with 429."""
        if len(self._waiting.get(tenant, ())) >= WAITING:
            text = "too many turns of this tenant wait; ask again when others have ended"
            raise HttpRefused(429, text, self._again_s(tenant))

    def _again_s(self, tenant: str) -> float:
        """Seconds until those that wait now have had their turns, as long as turns take lately."""
        oldest = next(iter(self._began.values()), math.inf)
        turn_s = max(self._turn_s, time.monotonic() - oldest)
        return turn_s * (len(self._waiting.get(tenant, ())) + 1) / self._each

    def _free(self, tenant: str) -> bool:
        return self._of[tenant] < self._each and self._of.total() < self._places

    def _drop(self, tenant: str, place: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(tenant, deque())
        with suppress(ValueError):  # its turn came, and it was cancelled already
            queue.remove(place)
        if not queue:
            self._waiting.pop(tenant, None)

    def _leave(self, tenant: str) -> None:
        """Give a place back, and free places to those that wait."""
        self._of[tenant] -= 1
        if not self._of[tenant]:
            del self._of[tenant]
        while waiting := next((each for each in self._waiting if self._free(each)), ""):
            queue = self._waiting.pop(waiting)
            place = queue.popleft()
            if queue:
                self._waiting[waiting] = queue  # behind the others
            if not place.done():
                self._of[waiting] += 1
                place.set_result(None)
