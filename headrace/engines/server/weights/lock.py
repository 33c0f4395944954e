"""The weight lock: lets requests sample from the weights that the server serves, and changes these weights.

Idea: a server holds one version. Requests for it enter together. A request for another version closes the gate to new
requests, waits until the ones inside have left, has the version changed, and opens the gate. A new `latest` does not
wait for the requests inside: the gate closes to new requests, and the change happens while the others are inside.

A request is inside for one attempt of a turn, not for an episode, so a change waits for one turn at most.
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
        """The version's name in the server: its weight version, and the start of the salt of its prefix cache.

        It contains the hash because a version that is trained again after a crash keeps its number.
        """
        return f"{self.version}-{self.state_hash[:16]}"


Change = Callable[[VersionFile], Awaitable[None]]


class NotServed(EngineError):
    """The server serves neither the new version nor the old one."""


class Gate:
    """Admits requests to the server while it serves their weights."""

    def __init__(self, change: Change) -> None:
        """change(weights): makes the server serve them; called with the gate closed."""
        self._change = change
        self._changing = asyncio.Lock()
        self._news = asyncio.Condition()
        self._closed = False
        self.inside = 0
        self.serving: VersionFile | None = None
        """None before the first version, and while the server's version is not known."""

    @asynccontextmanager
    async def enter(
        self, wanted: Callable[[], VersionFile], leave: Callable[[], None] = lambda: None
    ) -> AsyncIterator[VersionFile]:
        """Enter while the server serves the weights that `wanted` returns; `replace` may change them to a newer version
        meanwhile. leave: called before each wait, raises when the request goes to another server."""
        while True:
            leave()
            async with self._news:
                await self._news.wait_for(lambda: not self._closed)
                serving = self.serving
                if serving is not None and serving.label == wanted().label:
                    self.inside += 1
                    break
            leave()
            await self.turn_to(wanted)
        try:
            yield serving
        finally:
            self.inside -= 1
            async with self._news:
                self._news.notify_all()

    async def turn_to(self, wanted: Callable[[], VersionFile]) -> None:
        """Serve the weights that `wanted` returns, once no request is inside."""
        async with self._changing:
            if self.serving is not None and self.serving.label == wanted().label:
                return
            async with self.closed():
                await self.empty()
                await self._make(wanted())

    async def replace(self, weights: VersionFile) -> None:
        """Serve a newer version while the requests inside continue."""
        async with self._changing:
            async with self.closed():
                await self._make(weights)

    async def _make(self, weights: VersionFile) -> None:
        """Change the weights and set `serving`: the new ones, the old ones after a refusal, None when it is not
        known."""
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
        """While this context is open, no request enters."""
        self._closed = True
        try:
            yield
        finally:
            async with self._news:
                self._closed = False
                self._news.notify_all()

    async def empty(self) -> None:
        """Wait until no request is inside. Call it with the gate closed."""
        async with self._news:
            await self._news.wait_for(lambda: not self.inside)
