"""HTTP endpoints for agents that run their own tools: three dialects over one function that samples a turn.

    POST /v1/chat/completions, /v1/responses, /v1/messages     one turn; a stream if the request asks for it
    POST /v1/messages/count_tokens                             the tokens of a prompt
    GET  /v1/models, /v1/models/NAME                           the policies that are served
    POST /v1/client/sessions/ID/feedback                       {thumb | diff | undo | reward, comment?}: end and rate it
    POST /v1/client/sessions/ID/reward                         the same
    DELETE /v1/client/sessions/ID                              end the session without a rating

Every turn's answer names its session in the header `X-Headrace-Session`; that is the ID to rate. `X-Headrace-Left-Out`
names the request's keys that nothing honours (docs/request_keys.md).

The endpoints know HTTP, keys and dialects; the sampler knows sessions and the engine. While a streamed turn is sampled,
comments are sent on the connection, so that neither a proxy nor the client considers it dead.
"""

import asyncio
import json
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects.base import Dialect, Unusable, string
from headrace.gateway.dialects.chat import ChatCompletions
from headrace.gateway.dialects.messages import Messages
from headrace.gateway.dialects.responses import Responses
from headrace.gateway.http import HttpRefused, read_body, send
from headrace.gateway.requests import NewRating
from headrace.gateway.tenants.admission import Keyed, keyed
from headrace.gateway.tenants.keys import ApiKey
from headrace.messages.product import results_in_order

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages())
SESSION_HEADERS = ("x-headrace-session", "session-id", "session_id", "x-session-id", "conversation_id")
"""Headers in which clients name their session, first match wins. Codex sends ``session-id``."""
COMMENT_EVERY_S = 10.0
SESSION = "X-Headrace-Session"
LEFT_OUT = "X-Headrace-Left-Out"
PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Caller(NamedTuple):
    """The key of a request, and the session and user that it names."""

    key: ApiKey
    session: str
    """Empty if the client names no session."""
    user: str
    """Empty if the client names no user."""


class Begun(NamedTuple):
    """A turn under way."""

    session: str
    reply: Coroutine[Any, Any, ModelReply]


class Sampler(Protocol):
    """The source of turns behind the endpoints."""

    def begin(self, request: ModelRequest, caller: Caller) -> "Begun":
        """The session that a turn belongs to, and the turn to be awaited. HttpRefused when no turn can be sampled."""

    async def count(self, request: ModelRequest) -> int:
        """Tokens of the prompt."""

    def models(self) -> list[str]:
        """The model names that `GET /v1/models` lists."""

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> None:
        """Rate a session, which ends if it is open. HttpRefused when the key's tenant has no such session; BusError."""

    async def close(self, session: str, key: ApiKey) -> None:
        """End a session without a rating. HttpRefused when the key's tenant has no such session."""


class Endpoints:
    """Routes of the three dialects."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def routes(self) -> list[web.RouteDef]:
        """The routes for an aiohttp application."""
        turns = [web.post(dialect.path, keyed(self._turn(dialect))) for dialect in DIALECTS]
        return [
            *turns,
            web.post("/v1/messages/count_tokens", self._count),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name}", self._model),
            web.post("/v1/client/sessions/{session}/feedback", keyed(self._rate)),
            web.post("/v1/client/sessions/{session}/reward", keyed(self._rate)),
            web.delete("/v1/client/sessions/{session}", keyed(self._close)),
        ]

    def _turn(self, dialect: Dialect) -> Keyed:
        async def handler(request: web.Request, key: ApiKey) -> web.StreamResponse:
            asked = dialect.request(await _body(request))
            asked = msgspec.structs.replace(asked, messages=results_in_order(asked.messages))
            caller = Caller(key, _session(request, asked)[:200], asked.user[:200])
            if not asked.stream:
                begun = self._sampler.begin(asked, caller)
                reply = dialect.reply(await begun.reply, asked)
                return web.json_response(reply, headers=_headers(begun.session, asked))
            return await self._stream(request, dialect, asked, caller)

        return handler

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: ModelRequest, caller: Caller
    ) -> web.StreamResponse:
        """The turn as server-sent events. A refusal before the first byte keeps its status."""
        begun = self._sampler.begin(asked, caller)
        turn = asyncio.ensure_future(begun.reply)
        stream = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=stream | _headers(begun.session, asked))
        try:
            done, _ = await asyncio.wait({turn}, timeout=COMMENT_EVERY_S)
            if done:
                turn.result()
            await response.prepare(request)
            while not turn.done():
                await send(response, b": sampling\n\n")
                await asyncio.wait({turn}, timeout=COMMENT_EVERY_S)
            try:
                for event in dialect.events(turn.result(), asked):
                    await send(response, event)
            except HttpRefused as error:
                data = json.dumps(dialect.error(error.status, str(error)))
                await send(response, f"event: error\ndata: {data}\n\n".encode())
            await response.write_eof()
        finally:
            if not turn.done():
                turn.cancel()
                with suppress(asyncio.CancelledError):
                    await turn
        return response

    async def _count(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"input_tokens": await self._sampler.count(Messages().request(await _body(request)))})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_described(name) for name in self._sampler.models()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._sampler.models():
            raise HttpRefused(404, f"there is no model {name[:80]!r}; GET /v1/models lists them")
        return web.json_response(_described(name))

    async def _rate(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        body = await _body(request)
        body["comment"] = string(body.get("comment"), "comment")[:2000]
        try:
            rating = msgspec.convert(body, NewRating)
        except msgspec.ValidationError as error:
            raise Unusable(f"the rating: {error}") from None
        await self._sampler.rate(request.match_info["session"], key, rating)
        told = {"session": request.match_info["session"], "signal": rating.signal, "thumb": rating.given}
        return web.json_response(told)

    async def _close(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        await self._sampler.close(request.match_info["session"], key)
        return web.json_response({"session": request.match_info["session"], "state": "ended"})


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "headrace"}


def _headers(session: str, asked: ModelRequest) -> dict[str, str]:
    """The session, and the keys that were left out: the first twenty whose names a header can hold."""
    names = [name for name in asked.left_out if PLAIN.fullmatch(name)][:20]
    return {SESSION: session} | ({LEFT_OUT: ", ".join(names)} if names else {})


def _session(request: web.Request, asked: ModelRequest) -> str:
    """The session name from a header, otherwise from the body; empty if neither has one."""
    return next((request.headers[name] for name in SESSION_HEADERS if request.headers.get(name)), asked.session)


async def _body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Unusable if the body is something else or is nested too deeply."""
    try:
        value = json.loads(await read_body(request))
    except (ValueError, RecursionError):
        raise Unusable("the body: expected a JSON object") from None
    if not isinstance(value, dict):
        raise Unusable(f"the body: expected a JSON object, got {type(value).__name__}")
    return value
