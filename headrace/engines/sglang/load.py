"""Back-pressure: how many requests a server is given at once, from its own load figures.

Idea: a request that waits inside the server is worth nothing there, and it is wrong after a swap: it would be computed
with other weights than its prefix cache key says. So requests wait here. While any is inside, /v1/loads is read; the
allowance falls by what the server has waiting, and grows by half when it has nothing waiting and memory to spare.

Production goes first and has the whole allowance to itself: however many training requests are inside, they take none
of its places. The server retracts training requests for it by priority (`metrics`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from headrace.engines.base import EngineError

EVERY_S = 0.5
FULL = 0.95
"""Share of KV memory in use above which nothing is added."""


class Load(NamedTuple):
    """A server's figures, summed over its ranks."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Share of its KV memory in use: the fullest rank's."""
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0


def load_of(reply: Mapping[str, Any]) -> Load:
    """From the reply of GET /v1/loads."""
    ranks = [rank for rank in reply.get("loads", ()) if isinstance(rank, Mapping)]

    def figures(key: str) -> list[float]:
        return [float(rank.get(key) or 0.0) for rank in ranks] or [0.0]

    return Load(
        running=int(sum(figures("num_running_reqs"))),
        waiting=int(sum(figures("num_waiting_reqs"))),
        usage=max(figures("token_usage")),
        tokens_per_s=sum(figures("gen_throughput")),
        hit_rate=max(figures("cache_hit_rate")),
    )


def allowance(now: int, most: int, load: Load) -> int:
    """The next allowance: 1 to `most`."""
    if load.waiting:
        return max(1, load.running, now - load.waiting) if load.usage < FULL else max(1, now - load.waiting)
    return now if load.usage >= FULL else min(most, now + max(1, now // 2))


class Admission:
    """Admission of requests. `watch` runs for as long as the engine lives."""

    def __init__(self, most: int, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """most: requests at once at best. ask: GET /v1/loads; EngineError when the server does not answer."""
        self.most = self.allowed = most
        self.load = Load()
        self.inside = self.waiting = 0
        self._first = self._first_waiting = 0
        """Those of them with priority."""
        self._ask = ask
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def place(self, first: bool = False) -> AsyncIterator[None]:
        """Wait for a place and hold it. first: with priority over requests without it, and not counted among them."""
        async with self._news:
            self.waiting += 1
            self._first_waiting += first
            try:
                await self._news.wait_for(lambda: self._may_enter(first))
            finally:
                self.waiting -= 1
                self._first_waiting -= first
            self.inside += 1
            self._first += first
            self._news.notify_all()
        try:
            yield
        finally:
            self.inside -= 1
            self._first -= first
            async with self._news:
                self._news.notify_all()

    def _may_enter(self, first: bool) -> bool:
        if first:
            return self._first < self.allowed
        return self.inside < self.allowed and not self._first_waiting

    async def watch(self, every_s: float = EVERY_S) -> None:
        """Read the server's figures while any request is inside."""
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self.inside > 0)
            await self.look()
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Read the figures once, and adjust."""
        try:
            self.load = load_of(await self._ask())
        except EngineError:
            return  # a server that is gone or paused says so to those inside
        async with self._news:
            self.allowed = allowance(self.allowed, self.most, self.load)
            self._news.notify_all()
