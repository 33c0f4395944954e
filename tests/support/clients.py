"""A gateway's endpoints on a real port, with a sampler that follows a script: what tests of client programs share."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.endpoints import Begun, Endpoints
from headrace.gateway.http import HttpRefused, Listener
from headrace.gateway.requests import NewRating
from headrace.gateway.sessions import Caller
from headrace.gateway.tenants.admission import Admission, keyed
from headrace.messages.product import ApiKey, ClientCall, ClientSession, ClientUsage
from tests.support.api_keys import KnownKeys

Script = Callable[[ModelRequest], tuple[str, tuple[ClientCall, ...]]]
"""From a request to the text and the calls of the turn."""


class ScriptedSampler:
    """Replies by a script and remembers what was asked."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[tuple[ModelRequest, Caller]] = []
        self.rated: list[tuple[str, NewRating]] = []
        self.opened: list[dict[str, str]] = []
        self.lost: list[bool] = []

    async def open(self, caller: Caller, labels: dict[str, str]) -> ClientSession:
        self.opened.append(labels)
        return ClientSession(group="s1", tenant=caller.key.tenant, training_allowed=caller.key.training, labels=labels)

    async def view(self, session: str, key: ApiKey) -> dict[str, Any]:
        return {"session": session}

    async def answered(self, reply: ModelReply, lost: bool) -> None:
        self.lost.append(lost)

    async def begin(self, request: ModelRequest, caller: Caller) -> Begun:
        self.asked.append((request, caller))
        return Begun(lambda: ("s1", 0), self._sample(request), asyncio.Queue(), MOST)

    async def _sample(self, request: ModelRequest) -> ModelReply:
        text, calls = self._script(request)
        return ModelReply(
            id=f"t{len(self.asked)}",
            model=request.model,
            created=int(time.time()),
            session="s1",
            text=text,
            calls=calls,
            stop="calls" if calls else "stop",
            usage=ClientUsage(
                prompt=sum(len(said.text.split()) for said in request.messages), sampled=len(text.split())
            ),
        )

    async def count(self, request: ModelRequest) -> int:
        return sum(len(said.text.split()) for said in request.messages)

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> dict[str, str]:
        self.rated.append((session, rating))
        return {"outcome": "waiting", "reason": ""}

    async def close(self, session: str, key: ApiKey) -> None:
        raise HttpRefused(404, "there is no such open session")


MOST = 4096
"""Tokens that a turn may sample."""
PLACES = 64
"""Turns that are sampled at once."""


class Served(NamedTuple):
    url: str
    key: str
    sampler: ScriptedSampler
    keys: KnownKeys


@asynccontextmanager
async def endpoints(folder: Path, script: Script) -> AsyncIterator[Served]:
    """The endpoints on a free port of loopback, and a key for them."""
    keys = KnownKeys()
    key = keys.add("acme", training=True)
    sampler = ScriptedSampler(script)

    async def report(error: Exception, doing: str) -> None:
        raise AssertionError(doing) from error

    turns = Endpoints(sampler, report, PLACES)
    sessions = [  # as the gateway actor routes a session of a client
        *(web.post(f"/v1/sessions/{{session}}/{rating}", keyed(turns.rate)) for rating in ("feedback", "reward")),
        web.delete("/v1/sessions/{session}", keyed(turns.close)),
    ]
    listener = Listener([*turns.routes(), *sessions], Admission(keys).admit, report)
    try:
        yield Served(await listener.start("127.0.0.1", 0), key, sampler, keys)
    finally:
        await listener.stop()


def two_reads(request: ModelRequest) -> tuple[str, tuple[ClientCall, ...]]:
    """First two calls at once, then an answer that quotes both results."""
    results = [said.text for said in request.messages if said.role == "tool"]
    if results:
        return f"They say {' and '.join(results)}.", ()
    paths = ("a.py", "b.py")
    calls = tuple(
        ClientCall(id=f"call_{index}", name="read", arguments=json.dumps({"path": path}))
        for index, path in enumerate(paths)
    )
    return "I read both.", calls
