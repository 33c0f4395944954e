"""The HTTP endpoint of a rollout actor's harnesses: the gateway's own routes and dialects, without a port.

Connections come through the tunnels of sandboxes. Each attempt has a key, and the key decides whose conversations a
request belongs to: on a backend whose sandboxes share a loopback, no attempt reaches another one's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.actors.rollout.harnesses.conversations import Conversations
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.endpoints import Begun, Endpoints
from headrace.gateway.http import HttpRefused, Listener
from headrace.gateway.requests import NewRating
from headrace.gateway.sessions import Caller
from headrace.gateway.tenants.admission import Admission
from headrace.gateway.tenants.keys import ApiKeys
from headrace.messages.product import KEYS, ApiKey, ClientSession

PLACES = 1 << 20
"""Turns that are sampled at once: the engine and the credit of the actor bound them."""


class Endpoint:
    """`open` it once; `serving` an attempt makes its key known."""

    def __init__(self, event: Callable[..., Awaitable[None]]) -> None:
        """event: `Actor.event`."""
        self._keys, self._attempts, self._event = ApiKeys(), dict[str, Conversations](), event
        routes = Endpoints(self, self._report, PLACES).routes()
        self._listener = Listener(routes, Admission(self._keys).admit, self._report)
        self._protocol: Callable[[], asyncio.Protocol] | None = None
        self._opening = asyncio.Lock()

    async def _report(self, error: Exception, where: str) -> None:
        await self._event("endpoint_error", f"{where}: {type(error).__name__}: {error}", "error")

    async def protocol(self) -> Callable[[], asyncio.Protocol]:
        """A function that makes the protocol of a connection."""
        async with self._opening:
            if self._protocol is None:
                self._protocol = await self._listener.open()
            return self._protocol

    @contextmanager
    def serving(self, conversations: Conversations) -> Iterator[None]:
        """Answer an attempt's requests while this context is open."""
        key = conversations.api_key
        self._keys.apply(KEYS + key.id, key)
        self._attempts[key.id] = conversations
        try:
            yield
        finally:
            self._keys.apply(KEYS + key.id, None)
            del self._attempts[key.id]

    async def stop(self) -> None:
        """Close every connection."""
        await self._listener.stop()

    # Of `Sampler`.

    async def begin(self, request: ModelRequest, caller: Caller) -> Begun:
        """`Sampler.begin`."""
        return await self._of(caller.key).begin(request, caller)

    async def answered(self, reply: ModelReply, lost: bool) -> None:
        """`Sampler.answered`, of an attempt that may have ended."""
        for conversations in self._attempts.values():
            await conversations.answered(reply, lost)

    async def count(self, request: ModelRequest) -> int:
        """Rough: this route says no key."""
        return sum(len(message.text) for message in request.messages) // 4

    async def open(self, caller: Caller, labels: dict[str, str]) -> ClientSession:
        """A harness opens no session."""
        raise _none()

    async def view(self, session: str, key: ApiKey) -> dict[str, Any]:
        """A harness sees no session."""
        raise _none()

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> dict[str, str]:
        """A harness rates nothing."""
        raise _none()

    async def close(self, session: str, key: ApiKey) -> None:
        """A harness ends no session."""
        raise _none()

    def _of(self, key: ApiKey) -> Conversations:
        conversations = self._attempts.get(key.id)
        if conversations is None:
            raise HttpRefused(403, "the attempt has ended")
        return conversations


def _none() -> HttpRefused:
    return HttpRefused(404, "this endpoint answers turns alone")
