"""HTTP endpoints for agents that run their own tools: three dialects over one function that samples a turn.

    POST /v1/chat/completions, /v1/responses, /v1/messages     one turn; a stream if the request asks for it
    POST /v1/messages/count_tokens                             the tokens of a prompt
    GET  /v1/models, /v1/models/NAME                           the policies that are served
    POST /v1/sessions                                          {task?, group?, user?, metadata?}: open a session
    GET  /v1/sessions/ID                                       its state and its branches
    POST /v1/sessions/ID/feedback                              {thumb | diff | undo | reward, comment?}: end and rate it
    POST /v1/sessions/ID/reward                                the same
    DELETE /v1/sessions/ID                                     end the session without a rating

The last three stand under /v1/client/sessions too. The gateway actor routes /v1/sessions, which headrace's own agent
shares. Every turn's answer names its session in the header `X-Headrace-Session`; that is the ID that requests may name
in the same header, and the ID to rate. `X-Headrace-Left-Out` names the request's keys that nothing honours
(docs/request_keys.md).

The endpoints know HTTP, keys and dialects; the sampler knows sessions and the engine. While a streamed turn is sampled,
comments are sent on the connection, so that neither a proxy nor the client considers it dead.
"""

import asyncio
import json
import re
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from headrace.gateway.client_sessions import Caller
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects.base import Dialect, Unusable, string
from headrace.gateway.dialects.chat import ChatCompletions
from headrace.gateway.dialects.clients import session_name
from headrace.gateway.dialects.messages import Messages
from headrace.gateway.dialects.responses import Responses
from headrace.gateway.http import HttpRefused, read_body, read_json, send
from headrace.gateway.requests import NewRating, NewSession
from headrace.gateway.tenants.admission import Keyed, keyed
from headrace.gateway.tenants.keys import ApiKey
from headrace.messages.product import ClientSession, results_in_order

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages())
COMMENT_EVERY_S = 10.0
SESSION = "X-Headrace-Session"
LEFT_OUT = "X-Headrace-Left-Out"
PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Begun(NamedTuple):
    """A turn under way."""

    session: str
    reply: Awaitable[ModelReply]


class Sampler(Protocol):
    """The source of turns behind the endpoints."""

    async def open(self, caller: Caller, labels: dict[str, str]) -> ClientSession:
        """A new session. labels: what the client says about it. BusError."""

    async def begin(self, request: ModelRequest, caller: Caller) -> "Begun":
        """The session that a turn belongs to, and the turn to be awaited. HttpRefused when no turn can be sampled."""

    async def answered(self, reply: ModelReply, lost: bool) -> None:
        """A reply was sent to its client, or could not be."""

    async def count(self, request: ModelRequest) -> int:
        """Tokens of the prompt."""

    def models(self) -> list[str]:
        """The model names that `GET /v1/models` lists."""

    async def view(self, session: str, key: ApiKey) -> dict[str, Any]:
        """A session as its client sees it. HttpRefused when the key's tenant has no such session."""

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> dict[str, str]:
        """Rate a session, which ends if it is open; `Ratings.outcome`. HttpRefused when the key's tenant has no such
        session; BusError."""

    async def close(self, session: str, key: ApiKey) -> None:
        """End a session without a rating. HttpRefused when the key's tenant has no such session."""


class Endpoints:
    """Routes of the three dialects."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def routes(self) -> list[web.RouteDef]:
        """The routes for an aiohttp application."""
        turns = [web.post(dialect.path, keyed(self._turn(dialect))) for dialect in DIALECTS]
        where = "/v1/client/sessions"
        return [
            *turns,
            *(web.post(f"{where}/{{session}}/{rating}", keyed(self.rate)) for rating in ("feedback", "reward")),
            web.delete(f"{where}/{{session}}", keyed(self.close)),
            web.post("/v1/messages/count_tokens", self._count),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name}", self._model),
        ]

    def _turn(self, dialect: Dialect) -> Keyed:
        async def handler(request: web.Request, key: ApiKey) -> web.StreamResponse:
            asked = dialect.request(await _body(request))
            asked = msgspec.structs.replace(asked, messages=results_in_order(asked.messages))
            caller = caller_of(request, key, asked.user)
            if not asked.stream:
                begun = await self._sampler.begin(asked, caller)
                reply = await begun.reply
                await self._sampler.answered(reply, lost=caller.gone())
                return web.json_response(dialect.reply(reply, asked), headers=_headers(reply.session, asked))
            return await self._stream(request, dialect, asked, caller)

        return handler

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: ModelRequest, caller: Caller
    ) -> web.StreamResponse:
        """The turn as server-sent events. A refusal before the first byte keeps its status."""
        begun = await self._sampler.begin(asked, caller)
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
            if not turn.exception():
                await self._sampler.answered(turn.result(), lost=caller.gone())
        except OSError:  # the connection is lost
            if turn.done() and not turn.exception():
                await self._sampler.answered(turn.result(), lost=True)
            raise
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

    async def open(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """Open a session. 400: the body is invalid."""
        asked = await read_json(request, NewSession)
        labels = {"task": asked.task, "group": asked.group} | asked.metadata
        caller = caller_of(request, key, asked.user)
        session = await self._sampler.open(caller, {name: text for name, text in labels.items() if text})
        return web.json_response({"session": session.group}, status=201, headers={SESSION: session.group})

    async def view(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """The state of a session."""
        return web.json_response(await self._sampler.view(request.match_info["session"], key))

    async def rate(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """End and rate a session."""
        body = await _body(request)
        body["comment"] = string(body.get("comment"), "comment")[:2000]
        try:
            rating = msgspec.convert(body, NewRating)
        except msgspec.ValidationError as error:
            raise Unusable(f"the rating: {error}") from None
        outcome = await self._sampler.rate(request.match_info["session"], key, rating)
        told = outcome | {"session": request.match_info["session"], "signal": rating.signal, "thumb": rating.given}
        return web.json_response(told)

    async def close(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """End a session."""
        await self._sampler.close(request.match_info["session"], key)
        return web.json_response({"session": request.match_info["session"], "state": "ended"})


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "headrace"}


def _headers(session: str, asked: ModelRequest) -> dict[str, str]:
    """The session, and the keys that were left out: the first twenty whose names a header can hold."""
    names = [name for name in asked.left_out if PLAIN.fullmatch(name)][:20]
    return {SESSION: session} | ({LEFT_OUT: ", ".join(names)} if names else {})


def caller_of(request: web.Request, key: ApiKey, user: str) -> Caller:
    """The sender of a request: its headers name the session, or the client's own session, and tell a retry."""
    headers = request.headers
    return Caller(
        key=key,
        user=user[:200],
        session=headers.get(SESSION, "")[:200],
        name=session_name(headers)[:200],
        retry=headers.get("Idempotency-Key", "")[:200],
        again=headers.get("X-Stainless-Retry-Count", "0") != "0",
        gone=lambda: request.transport is None or request.transport.is_closing(),
    )


async def _body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Unusable if the body is something else or is nested too deeply."""
    try:
        value = json.loads(await read_body(request))
    except (ValueError, RecursionError):
        raise Unusable("the body: expected a JSON object") from None
    if not isinstance(value, dict):
        raise Unusable(f"the body: expected a JSON object, got {type(value).__name__}")
    return value
