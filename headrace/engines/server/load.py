"""Back-pressure: limits the number of requests inside a server, by the server's load figures.

Idea: a request gains nothing from waiting inside the server, and after a swap it would be computed with other weights
than its prefix-cache key names. So requests wait here. While any request is inside, the scheduler's figures are
read: the allowance falls by the number of requests that wait in the server, and grows by half when none waits and
memory is free.

Production goes first and has the whole allowance: training requests inside do not count against it. A server with
priorities retracts training requests when production needs the memory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.engines.base import EngineError
from headrace.engines.server.backend import Load

EVERY_S = 0.5
FULL = 0.95
"""Share of KV memory in use from which the allowance does not grow."""


def allowance(now: int, most: int, load: Load) -> int:
    """The next allowance, from 1 to `most`. now: the present one."""
    if load.waiting:
        return max(1, load.running, now - load.waiting) if load.usage < FULL else max(1, now - load.waiting)
    return now if load.usage >= FULL else min(most, now + max(1, now // 2))


class Admission:
    """Admits requests up to the allowance, in the order of their arrival. `watch` runs until the engine ends.

    A request that leaves hands its place to the next one that waits: if all of them looked for a place, each entry and
    exit of n requests would wake n tasks.
    """

    def __init__(self, most: int, ask: Callable[[], Awaitable[Load]]) -> None:
        """most: largest allowance. ask: reads the scheduler's figures; EngineError when the server does not answer."""
        self.most = self.allowed = most
        self.load = Load()
        self.inside = 0
        self._first = 0
        """The number of requests inside that have priority."""
        self._waiting: dict[bool, dict[asyncio.Future[None], None]] = {True: {}, False: {}}
        """The requests that wait, the oldest first, with priority and without."""
        self._ask = ask
        self._occupied = asyncio.Event()
        """Set while any request is inside."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, first: bool = False) -> AsyncIterator[None]:
        """Wait for a place and hold it. first: the request has priority, and other requests do not count against it."""
        entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[first][entry] = None
        self._admit()
        try:
            await entry
        except asyncio.CancelledError:
            if entry.cancelled():
                self._waiting[first].pop(entry, None)
                self._admit()  # a request without priority may have waited for this one
            else:
                self._leave(first)  # it was admitted and cancelled before it ran
            raise
        try:
            yield
        finally:
            self._leave(first)

    def _leave(self, first: bool) -> None:
        self.inside -= 1
        self._first -= first
        self._admit()

    def _admit(self) -> None:
        """Let requests in while places are free; those without priority only when no other waits."""
        for first, waiting in self._waiting.items():
            while waiting and self._may_enter(first):
                entry = next(iter(waiting))
                del waiting[entry]
                if entry.cancelled():
                    continue
                self.inside += 1
                self._first += first
                entry.set_result(None)
        if self.inside:
            self._occupied.set()
        else:
            self._occupied.clear()

    def _may_enter(self, first: bool) -> bool:
        if first:
            return self._first < self.allowed
        return self.inside < self.allowed and not self._waiting[True]

    async def watch(self, every_s: float = EVERY_S) -> None:
        """Read the server's figures every `every_s` seconds while any request is inside."""
        while True:
            await self._occupied.wait()
            await self.look()
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Read the figures once and adjust the allowance."""
        try:
            self.load = await self._ask()
        except EngineError:
            return  # the requests inside report a server that is gone
        self.allowed = allowance(self.allowed, self.most, self.load)
        self._admit()
