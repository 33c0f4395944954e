"""HTTP endpoints for agents that run their own tools: three dialects over one function that samples a turn.

    POST /v1/chat/completions, /v1/responses, /v1/messages     one turn; a stream if the request asks for it
    POST /v1/responses/compact                                 a summary that stands for a history
    POST /v1/messages/count_tokens                             the tokens of a prompt
    GET  /v1/models, /v1/models/NAME                           the policies that are served
    POST /v1/sessions                                          {task?, group?, user?, metadata?}: open a session
    GET  /v1/sessions/ID                                       its state and its branches
    POST /v1/sessions/ID/feedback                              {thumb | diff | undo | reward, comment?}: end and rate it
    POST /v1/sessions/ID/reward                                the same
    DELETE /v1/sessions/ID                                     end the session without a rating

The gateway actor routes /v1/sessions, which headrace's own agent shares. Every turn's answer names its session in the
header `X-Headrace-Session`; that is the ID that requests may name in the same header, and the ID to rate.
`X-Headrace-Left-Out` names the request's keys that nothing honours (docs/request_keys.md).

The endpoints know HTTP, keys and dialects; the sampler knows sessions and the engine. A streamed turn goes out as it is
sampled. While nothing is sampled, comments are sent on the connection, so that neither a proxy nor the client considers
it dead. A client that goes away ends its turn, streamed or not. One that reads slowly delays nobody: parts wait here.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from headrace.bus.errors import BusError
from headrace.gateway.conversation import ModelReply, ModelRequest, reply_id
from headrace.gateway.dialects.base import Dialect, Unusable, string
from headrace.gateway.dialects.chat import ChatCompletions
from headrace.gateway.dialects.clients import session_name
from headrace.gateway.dialects.messages import Messages
from headrace.gateway.dialects.responses import Compaction, Responses
from headrace.gateway.dialects.writer import BrokenStream, Head, Writer
from headrace.gateway.http import ENDS, STREAM, HttpRefused, Report, read_body, read_json, send
from headrace.gateway.requests import NewRating, NewSession
from headrace.gateway.sessions import Caller, root_of
from headrace.gateway.tenants.admission import Keyed, keyed
from headrace.gateway.tenants.limits import RateLimit, TurnsAtOnce
from headrace.messages.product import ApiKey, ClientSession, ClientTurnPart, results_in_order

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Compaction(), Messages())
COMMENT_EVERY_S = 10.0
LATEST = "latest"
"""The only model name that is listed; every model name in a request selects the served policy."""
MODEL = {"id": LATEST, "object": "model", "created": 0, "owned_by": "headrace"}
SESSION = "X-Headrace-Session"
LEFT_OUT = "X-Headrace-Left-Out"
PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


Parts = asyncio.Queue[ClientTurnPart | None]
"""None at the end."""


class Begun(NamedTuple):
    """A turn under way."""

    place: Callable[[], tuple[str, int]]
    """The session, and the index of the turn in it. The turn may go on in a branch before its first part."""
    reply: Awaitable[ModelReply]
    """When it is cancelled, the engine ends the turn and records what it sampled."""
    parts: Parts
    """Its parts while it is sampled, if the request asks for a stream."""
    most: int = 0
    """Tokens that it may sample; 0 for one that is recorded already."""


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

    async def view(self, session: str, key: ApiKey) -> dict[str, Any]:
        """A session as its client sees it. HttpRefused when the key's tenant has no such session."""

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> dict[str, str]:
        """Rate a session, which ends if it is open; `Ratings.outcome`. HttpRefused when the key's tenant has no such
        session; BusError."""

    async def close(self, session: str, key: ApiKey) -> None:
        """End a session without a rating. HttpRefused when the key's tenant has no such session."""


class Endpoints:
    """Routes of the three dialects."""

    def __init__(self, sampler: Sampler, report: Report, places: int) -> None:
        """report: receives the gateway's own defects. places: the turns that are sampled at once."""
        self._sampler, self._report, self._at_once = sampler, report, TurnsAtOnce(places)
        self._tokens = RateLimit(burst_s=60.0)
        self._repeats = WeakValueDictionary[tuple[str, str | int], asyncio.Lock]()
        """By API key and Idempotency-Key: requests with one come one after another."""

    def routes(self) -> list[web.RouteDef]:
        """The routes for an aiohttp application."""
        turns = [web.post(dialect.path, keyed(self._turn(dialect))) for dialect in DIALECTS]
        return [
            *turns,
            web.post("/v1/messages/count_tokens", self._count),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name}", self._model),
        ]

    def _turn(self, dialect: Dialect) -> Keyed:
        async def handler(request: web.Request, key: ApiKey) -> web.StreamResponse:
            self._at_once.refuse_full(key.tenant)
            request[ENDS] = True
            repeat = request.headers.get("Idempotency-Key") or id(request)
            async with self._repeats.setdefault((key.id, repeat), asyncio.Lock()):  # nothing of a repeat is read before
                return await turn(request, key)

        async def turn(request: web.Request, key: ApiKey) -> web.StreamResponse:
            asked = dialect.request(await _body(request))
            asked = msgspec.structs.replace(asked, messages=results_in_order(asked.messages))
            caller = caller_of(request, key, asked.user)
            if key.tokens_per_minute and (wait_s := self._tokens.wait(key.id, key.tokens_per_minute, 1.0)) > 0:
                raise HttpRefused(429, f"more than {key.tokens_per_minute} tokens a minute with this key", wait_s)
            if asked.stream:
                async with self._at_once.turn(key.tenant):
                    begun = await self._begin(asked, caller)
                    return await self._stream(request, dialect, asked, caller, begun)
            replies = await self._samples(asked, caller)
            for reply in replies:
                await self._sampler.answered(reply, lost=caller.gone())
            return web.json_response(dialect.reply(replies, asked), headers=_headers(replies[0].session, asked))

        return handler

    async def _begin(self, asked: ModelRequest, caller: Caller) -> Begun:
        begun = await self._sampler.begin(asked, caller)
        if begun.most and caller.key.tokens_per_minute:
            begun = begun._replace(reply=self._spent(begun, caller.key))
        return begun

    async def _samples(self, asked: ModelRequest, caller: Caller) -> list[ModelReply]:
        """The whole replies to a request. Further samples are branches of the first one's tree."""
        first = asyncio.get_running_loop().create_future()

        async def sample(number: int) -> ModelReply:
            async with self._at_once.turn(caller.key.tenant):
                by = msgspec.structs.replace(caller, session=root_of(await first)) if number else caller
                begun = await self._begin(msgspec.structs.replace(asked, sample=number), by)
                if not number:
                    first.set_result(begun.place()[0])
                return await begun.reply

        samples = [asyncio.ensure_future(sample(number)) for number in range(asked.samples)]
        try:
            return await asyncio.gather(*samples)
        finally:
            for each in samples:
                await _cancel(each)

    async def _spent(self, begun: Begun, key: ApiKey) -> ModelReply:
        """The reply, whose tokens the key has spent then. A turn that is cut counts with all that it might sample."""
        tokens = begun.most
        try:
            reply = await begun.reply
            tokens = reply.usage.prompt + reply.usage.sampled
        except Exception:  # our own failure costs nothing
            tokens = 0
            raise
        finally:
            self._tokens.spend(key.id, key.tokens_per_minute, tokens)
        return reply

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: ModelRequest, caller: Caller, begun: Begun
    ) -> web.StreamResponse:
        """The turn as server-sent events. A refusal before the first byte keeps its status; later ones are events."""
        turn = asyncio.ensure_future(begun.reply)
        turn.add_done_callback(lambda _: begun.parts.put_nowait(None))
        response = web.StreamResponse(headers=STREAM)
        writer: Writer | None = None

        async def opened() -> Writer:
            """Begin the answer, now that the turn has its place."""
            session, index = begun.place()
            response.headers.update(_headers(session, asked))
            await response.prepare(request)
            head = Head(id=reply_id(session, index), model=asked.model or LATEST, created=int(time.time()))
            return dialect.writer(asked, head)

        try:
            while not turn.done():
                part, data = None, b": sampling\n\n"
                with suppress(TimeoutError):
                    async with asyncio.timeout(COMMENT_EVERY_S):
                        part = await begun.parts.get()
                    if part is None:
                        break
                writer = writer or await opened()
                if part is not None:
                    data = b"".join(writer.part(part))
                await send(response, data)
            if writer is None:
                turn.result()
                writer = await opened()
            await send(response, b"".join(await self._end(request, writer, turn, begun.parts)))
            await response.write_eof()
            if not turn.exception():
                with suppress(BusError):  # the turn is stored; only that its answer arrived is not
                    await self._sampler.answered(turn.result(), lost=caller.gone())
        except OSError:  # the connection is lost
            if turn.done() and not turn.cancelled() and not turn.exception():
                with suppress(BusError):
                    await self._sampler.answered(turn.result(), lost=True)
        finally:
            await _cancel(turn)
        return response

    async def _end(
        self, request: web.Request, writer: Writer, turn: "asyncio.Future[ModelReply]", parts: Parts
    ) -> list[bytes]:
        """The last events of a stream."""
        events: list[bytes] = []
        while not parts.empty():
            if (part := parts.get_nowait()) is not None:
                events += writer.part(part)
        try:
            return [*events, *writer.end(await turn)]
        except HttpRefused as error:
            status, text = error.status, str(error)
        except BrokenStream as error:
            status, text = 502, f"{error}; this answer does not count, send the request again"
        except BusError as error:
            status, text = 503, f"the message bus is unavailable, try again: {error}"
        except Exception as error:
            await self._report(error, f"streaming {request.path}")
            status, text = 500, "internal error; the gateway has reported it"
        return [*events, *writer.fail(status, text)]

    async def _count(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"input_tokens": await self._sampler.count(Messages().request(await _body(request)))})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [MODEL]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name != LATEST:
            raise HttpRefused(404, f"there is no model {name[:80]!r}; GET /v1/models lists them")
        return web.json_response(MODEL)

    async def open(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """Open a session. 400: the body is invalid."""
        asked = await read_json(request, NewSession)
        labels = asked.metadata | {"task": asked.task, "group": asked.group}
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


def _headers(session: str, asked: ModelRequest) -> dict[str, str]:
    """The session, and the keys that were left out: the first twenty whose names a header can hold."""
    names = [name for name in asked.left_out if PLAIN.fullmatch(name)][:20]
    return {SESSION: session} | ({LEFT_OUT: ", ".join(names)} if names else {})


def caller_of(request: web.Request, key: ApiKey, user: str) -> Caller:
    """The sender of a request: its headers name the session, or the client's own session, and tell a retry."""
    headers = request.headers
    return Caller(
        key=key,
        user=user,
        session=headers.get(SESSION, "")[:200],
        name=session_name(headers)[:200],
        retry=headers.get("Idempotency-Key", "")[:200],
        again=headers.get("X-Stainless-Retry-Count", "0") != "0",
        gone=lambda: request.transport is None or request.transport.is_closing(),
    )


async def _cancel(turn: "asyncio.Future[ModelReply]") -> None:
    """Cut a turn that its client does not wait for."""
    if not turn.done():
        turn.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await turn


async def _body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Unusable if the body is something else or is nested too deeply."""
    try:
        value = json.loads(await read_body(request))
    except (ValueError, RecursionError):
        raise Unusable("the body: expected a JSON object") from None
    if not isinstance(value, dict):
        raise Unusable(f"the body: expected a JSON object, got {type(value).__name__}")
    return value
