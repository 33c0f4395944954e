"""The weights that the server serves, and the requests that may sample from them now.

Idea: a server holds one weight set. Requests for it enter together; a request for another set closes the gate behind
those that run, waits until they are through, has the set changed, and opens again for all who wait for that one. A new
version of the set in use needs no emptiness: the gate closes for newcomers, the change happens under those inside.

A request is inside for one attempt of a turn, never for an episode, so a change waits for a turn at most.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from headrace.engines.base import EngineError


class VersionFile(NamedTuple):
    """A verified version and its file."""

    version: int
    path: str
    state_hash: str

    @property
    def label(self) -> str:
        """Its name in the server: its weight version, and the salt of its prefix cache.

        The hash is in it because a version that is trained again after a crash keeps its number.
        """
        return f"{self.version}-{self.state_hash[:16]}"


Change = Callable[[VersionFile], Awaitable[None]]


class NotServed(EngineError):
    """After this the server serves no version at all: not the new one, and not the old one either."""


class Gate:
    """Entry to the server."""

    def __init__(self, change: Change) -> None:
        """change(weights): have the server serve them; called with the gate closed."""
        self._change = change
        self._changing = asyncio.Lock()
        self._news = asyncio.Condition()
        self._closed = False
        self.inside = 0
        self.serving: VersionFile | None = None
        """None before the first version, and while nobody knows what the server serves."""

    @asynccontextmanager
    async def enter(self, wanted: Callable[[], VersionFile]) -> AsyncIterator[VersionFile]:
        """Inside, the server serves what `wanted` says, or a newer version that replaces it under way."""
        while True:
            async with self._news:
                await self._news.wait_for(lambda: not self._closed)
                serving = self.serving
                if serving is not None and serving.label == wanted().label:
                    self.inside += 1
                    break
            await self.turn_to(wanted)
        try:
            yield serving
        finally:
            self.inside -= 1
            async with self._news:
                self._news.notify_all()

    async def turn_to(self, wanted: Callable[[], VersionFile]) -> None:
        """Serve what `wanted` says once nobody is inside."""
        async with self._changing:
            if self.serving is not None and self.serving.label == wanted().label:
                return
            async with self.closed():
                await self.empty()
                await self._make(wanted())

    async def replace(self, weights: VersionFile) -> None:
        """Serve a newer version of the set in use, with those inside going on."""
        async with self._changing:
            async with self.closed():
                await self._make(weights)

    async def _make(self, weights: VersionFile) -> None:
        """Change, and know afterwards what serves: the new, the old after a refusal, else nobody can tell."""
        before, done = self.serving, False
        try:
            await self._change(weights)
            self.serving = weights
            done = True
        except NotServed:
            raise
        except EngineError:
            self.serving = before
            done = True
            raise
        finally:
            if not done:
                self.serving = None

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """No request enters meanwhile."""
        self._closed = True
        try:
            yield
        finally:
            async with self._news:
                self._closed = False
                self._news.notify_all()

    async def empty(self) -> None:
        """Wait until nobody is inside; call it with the gate closed."""
        async with self._news:
            await self._news.wait_for(lambda: not self.inside)
