"""The gateway's HTTP listener: typed JSON requests, JSON answers, and limits on everything that a client controls.

Bodies are limited and decoded into typed structs; an invalid body is answered with status 400 and one sentence. TLS,
slow headers and the number of connections are the business of a proxy in front (docs/clients.md).
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from headrace.bus.errors import BusError
from headrace.errors import HeadraceError
from headrace.gateway.dialects.base import Unusable
from headrace.gateway.errors import error_of

HEALTH = "/healthz"
"""The one route that needs no key."""
MAX_BODY = 8 << 20
"""Bytes of a request's body."""
MAX_BODIES = 16 * MAX_BODY
"""Bytes of bodies that one API key may send at once. One of unknown or encoded length counts as the largest."""
BODY_S = 30.0
"""Seconds for a request's body to arrive."""
IDLE_S = 30.0
"""Longest time in seconds between two requests of a connection, and for a client to read a part of a stream."""
LINGER_S = 0.5
"""Seconds for which the rest of a refused body is read, so that its client reads the refusal."""
BUS_AGAIN_S = 5.0
"""Seconds after which a request that the bus could not take may be sent again."""
STOP_S = 1.0
"""Seconds that handlers get to finish when the listener stops."""
MAX_WAIT_S = 60.0
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of server-sent events; the last one keeps nginx from holding them back."""
REDACTED = "[API key]"
"""Takes the place of a key's text in a request's body."""

_SENDING = web.AppKey("sending", Counter[str])
"""Bytes of bodies that are read now, by API key."""
TOKEN = web.RequestKey("token", str)
"""The API key with which a request was admitted, as text."""
ENDS = web.RequestKey("ends", bool)
"""Set on a request whose handler is cancelled when its client disconnects."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Report = Callable[[Exception, str], Awaitable[None]]
Admit = Callable[[web.Request], Awaitable[None]]


class HttpRefused(HeadraceError):
    """The request cannot be served; the text says why and what to send instead.

    retry_s: seconds after which the same request may be served; 0 when it never is.
    """

    api_code = ""
    """Of the agents API; empty: by the status."""

    def __init__(self, status: int, text: str, retry_s: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.retry_s = status, retry_s


def answer(value: dict[str, Any], status: int = 200, retry_s: float = 0.0) -> web.Response:
    """A JSON response. Strings may hold lone surrogates: json escapes them. retry_s: as in HttpRefused."""
    return web.json_response(value, status=status, headers={"Retry-After": retry_after(retry_s)} if retry_s else None)


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


async def send(response: web.StreamResponse, data: bytes) -> None:
    """Write a part of a stream. A client that does not read it within `IDLE_S` loses the connection."""
    try:
        async with asyncio.timeout(IDLE_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read its stream") from None


async def read_body(request: web.Request) -> bytes:
    """The whole body, without the text of the request's API key: an agent may read its own environment, and a history
    is stored. HttpRefused with 400, 408, 413 or 429."""
    sending, token = request.app[_SENDING], request.get(TOKEN, "")
    size = request.content_length
    if size is None or "Content-Encoding" in request.headers:
        size = MAX_BODY
    try:
        if size > MAX_BODY:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY, size)
        if sending[token] + size > MAX_BODIES:
            raise HttpRefused(429, f"this key sends bodies of more than {MAX_BODIES} bytes at once", 1.0)
        sending[token] += size
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        finally:
            sending[token] -= size
            if not sending[token]:
                del sending[token]
        return body.replace(request[TOKEN].encode(), REDACTED.encode()) if TOKEN in request else body
    except TimeoutError:
        raise HttpRefused(408, f"the body did not arrive within {BODY_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise HttpRefused(413, f"the body is larger than {MAX_BODY} bytes") from None
    except (ConnectionError, web.RequestPayloadError):
        raise HttpRefused(400, "the body is incomplete, or is not in its Content-Encoding") from None


async def read_json(request: web.Request, type: type[T]) -> T:
    """The body as a struct. HttpRefused with 400, 408 or 413."""
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=type)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as error:
        raise HttpRefused(400, f"the body is not the expected JSON object: {error}") from None


def wait_seconds(request: web.Request) -> float:
    """The query parameter `wait`, 0 without one, at most `MAX_WAIT_S`. HttpRefused with 400."""
    text = request.query.get("wait", "0")
    try:
        seconds = float(text or "0")
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise HttpRefused(400, f"wait: expected a number of seconds from 0 to {MAX_WAIT_S:g}, got {text!a}")
    return min(seconds, MAX_WAIT_S)


def guarded(handler: Handler, report: Report) -> Handler:
    """A handler that answers every failure with JSON and one sentence, in the form of its route. report: receives the
    gateway's own defects.

    When the client disconnects, a GET handler is cancelled, and one that said so (`ENDS`); other handlers change state,
    so they run to their end.
    """

    async def respond(request: web.Request) -> web.StreamResponse:
        def clean(text: str) -> str:
            return text.replace(request[TOKEN], REDACTED) if TOKEN in request else text

        def failed(status: int, text: str, field: str = "", code: str = "", retry_s: float = 0.0) -> web.Response:
            text, field = clean(text), clean(field)
            if request.writer.output_size:  # an answer has begun: a second one would be read as the next answer
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError(f"an answer ended in the middle: {text}")
            return answer(error_of(request.path, status, text, field, code), status, retry_s)

        async def answered() -> web.StreamResponse:
            try:
                return await handler(request)
            except Unusable as error:
                return failed(400, str(error), error.field)
            except HttpRefused as error:
                return failed(error.status, str(error), code=error.api_code, retry_s=error.retry_s)
            except web.HTTPException as error:  # no such route, or not by this method
                return failed(error.status, f"{request.method} {request.path}: {error.reason}")
            except ConnectionError:
                raise
            except BusError as error:
                return failed(503, f"the message bus is unavailable, try again: {error}", retry_s=BUS_AGAIN_S)
            except Exception as error:
                await report(error, clean(f"{request.method} {request.path}"))
                return failed(500, "internal error; the gateway has reported it")

        work = asyncio.ensure_future(answered())
        try:
            return await (work if request.method == "GET" else asyncio.shield(work))
        except asyncio.CancelledError:
            if request.get(ENDS):
                work.cancel()
            # Nobody awaits it any more: asyncio would log the error of a lost connection, with a traceback.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    return respond


class _Requests(RequestHandler):
    """aiohttp's protocol of a connection. aiohttp itself logs a request that it cannot parse, and sends it back: with
    its headers, and so with the API key."""

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        text = "expected an HTTP/1.1 request with CRLF line ends and a body in a known Content-Encoding"
        response = answer(error_of(request.path, status, text), status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(sys.exc_info()[1], web.RequestPayloadError):
            super().log_exception(*args, **kw)


class Listener:
    """One HTTP port: `start`, then `stop`. Or `open` alone, for connections that come by another way."""

    def __init__(self, routes: list[web.RouteDef], admit: Admit, report: Report) -> None:
        """admit: stands before every handler, and raises HttpRefused. report: receives the handlers' exceptions other
        than HttpRefused, Unusable and BusError."""
        self._routes, self._admit, self._report = routes, admit, report
        self._server: asyncio.Server | None = None
        self._opened = False

    async def start(self, host: str, port: int) -> str:
        """Listen and return the URL. port: 0 chooses a free one."""
        connection = await self.open()
        self._server = await asyncio.get_running_loop().create_server(connection, host, port, backlog=512)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def open(self) -> Callable[[], asyncio.Protocol]:
        """A function that makes the protocol of a connection."""

        @web.middleware
        async def admitted(request: web.Request, handler: Handler) -> web.StreamResponse:
            async def respond(request: web.Request) -> web.StreamResponse:
                request[ENDS] = True  # nothing has changed yet
                await self._admit(request)
                request[ENDS] = False
                return await handler(request)

            return await guarded(respond, self._report)(request)

        app = web.Application(client_max_size=MAX_BODY, middlewares=[admitted])
        app[_SENDING] = Counter()
        app.add_routes(self._routes)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=STOP_S)
        await self._runner.setup()
        self._opened = True
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None
        options: dict[str, Any] = {"loop": loop, "access_log": None, "keepalive_timeout": IDLE_S}
        options["lingering_time"] = LINGER_S
        return lambda: _Requests(server, **options)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        if self._opened:
            await self._runner.cleanup()
