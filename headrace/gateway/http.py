"""The gateway's HTTP listener: typed JSON requests, JSON answers, and limits on everything that a client controls.

A client may send any bytes, send slowly, or never finish. So bodies are limited and decoded into typed structs; an
invalid body is answered with status 400 and one sentence. Connections are limited in number and time: a connection that
does not send its headers within `HEADER_S`, or is idle for `IDLE_S`, is closed. At `MAX_CONNECTIONS` a new one replaces
one without a complete request, the oldest of the address that has the most of them; so ten thousand silent connections
do not lock out a client at another address, nor one at the same address that sends its request at once. A new
connection gets a 503 only where handlers serve all others. aiohttp has no such limits, so `Connections` wraps its
server; it uses public interfaces only.
"""

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from headrace.bus.errors import BusError
from headrace.errors import HeadraceError
from headrace.gateway.dialects.base import Unusable
from headrace.gateway.errors import error_of
from headrace.gateway.tenants.limits import retry_after
from headrace.gateway.tls import Certificate

HEALTH = "/healthz"
"""The one route that needs no key."""
MAX_BODY = 8 << 20
"""Bytes of a request's body."""
BODY_S = 30.0
"""Seconds for a request's body to arrive."""
HEADER_S = 10.0
"""Seconds for a request's headers to arrive."""
IDLE_S = 30.0
"""Longest time in seconds between a response and the complete headers of the next request, and for a client to read a
part of a stream."""
MAX_CONNECTIONS = 1024
BUS_AGAIN_S = 5.0
"""Seconds after which a request that the bus could not take may be sent again."""
STOP_S = 1.0
"""Seconds that handlers get to finish when the listener stops."""
MAX_WAIT_S = 60.0
SWEEP_S = 0.25
"""Seconds between two checks of the deadlines."""

ENDS = web.RequestKey("ends", bool)
"""Set on a request whose handler is cancelled when its client disconnects."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Report = Callable[[Exception, str], Awaitable[None]]


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


async def send(response: web.StreamResponse, data: bytes) -> None:
    """Write a part of a stream. A client that does not read it within `IDLE_S` loses the connection."""
    try:
        async with asyncio.timeout(IDLE_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read its stream") from None


async def read_body(request: web.Request) -> bytes:
    """The whole body. HttpRefused with 400, 408 or 413."""
    try:
        connections = request.app.get(CONNECTIONS)
        with connections.reading(request) if connections is not None else nullcontext():
            async with asyncio.timeout(BODY_S):
                return await request.read()
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
        def failed(status: int, text: str, field: str = "", code: str = "", retry_s: float = 0.0) -> web.Response:
            if request.writer.output_size:  # an answer has begun: a second one would be read as the next answer
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError(f"an answer ended in the middle: {text}")
            return answer(error_of(request.path, status, text, field, code), status, retry_s)

        work = asyncio.ensure_future(handler(request))
        try:
            return await (work if request.method == "GET" else asyncio.shield(work))
        except asyncio.CancelledError:
            if request.get(ENDS):
                work.cancel()
            raise
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
            await report(error, f"{request.method} {request.path}")
            return failed(500, "internal error; the gateway has reported it")

    return respond


class Connections:
    """A protocol factory around aiohttp's server: limits the number of connections and gives each a deadline."""

    server: Callable[[], asyncio.Protocol]
    """Makes aiohttp's protocol of a connection; set once its application is set up."""

    def __init__(self) -> None:
        self.deadlines: dict[asyncio.Transport, float] = {}
        """The time (`time.monotonic`) at which each open connection is closed."""
        self._new: dict[asyncio.Transport, str] = {}
        self._reading: dict[asyncio.Transport, str] = {}
        self._idle: dict[asyncio.Transport, str] = {}
        """Addresses of the connections whose handler does not run, oldest first: without a complete request so far,
        with an incomplete body, and between two requests."""

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Connection(self)

    def __len__(self) -> int:
        """Open connections."""
        return len(self.deadlines)

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection; False where there is no place for it."""
        if len(self) >= MAX_CONNECTIONS:
            waiting = self._new or self._reading or self._idle
            if not waiting:
                return False
            [(most, _)] = Counter(waiting.values()).most_common(1)
            oldest = next(transport for transport, address in waiting.items() if address == most)
            oldest.abort()
            self.closed(oldest)
        self.deadlines[transport] = time.monotonic() + HEADER_S
        self._new[transport] = _address(transport)
        return True

    def closed(self, transport: asyncio.Transport) -> None:
        """Remove a connection from the count."""
        for place in (self.deadlines, self._new, self._reading, self._idle):
            place.pop(transport, None)

    @contextmanager
    def reading(self, request: web.Request) -> Iterator[None]:
        """A context around reading a request's body."""
        transport = cast("asyncio.Transport", request.transport)
        if transport in self.deadlines:
            self._reading[transport] = _address(transport)
        try:
            yield
        finally:
            self._reading.pop(transport, None)

    async def timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Suspend a connection's deadline while its handler runs: handlers limit their own time."""
        transport = cast("asyncio.Transport", request.transport)
        if transport in self.deadlines:
            self.deadlines[transport] = math.inf
            self._new.pop(transport, None)
            self._idle.pop(transport, None)
        try:
            return await handler(request)
        finally:
            if transport in self.deadlines:
                self.deadlines[transport] = time.monotonic() + IDLE_S
                self._idle[transport] = _address(transport)

    async def sweep(self) -> None:
        """Close connections whose deadline has passed, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for transport in [transport for transport, deadline in self.deadlines.items() if now > deadline]:
                transport.abort()


def _address(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return peer[0] if peer else ""  # no address where the client is gone


CONNECTIONS = web.AppKey("connections", Connections)


class _Connection(asyncio.Protocol):
    """Passes a connection's events to aiohttp's protocol, and counts the connection while it is open."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._protocol: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's transports have no common base class
        if not self._connections.opened(transport):
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n")
            transport.write(b"Connection: close\r\n\r\n")
            transport.close()
            return
        self._transport, self._protocol = transport, self._connections.server()
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._protocol is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._protocol is not None else None

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is not None and self._transport is not None:
            self._connections.closed(self._transport)
            self._protocol.connection_lost(exc)


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
    """One HTTP port: `start`, then `stop`."""

    def __init__(self, routes: list[web.RouteDef], admit: Callable[[web.Request], None], report: Report) -> None:
        """admit: stands before every handler, and raises HttpRefused. report: receives the handlers' exceptions other
        than HttpRefused, Unusable and BusError."""
        self.connections: Connections | None = None
        self._routes, self._admit, self._report = routes, admit, report
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: Certificate | None = None) -> str:
        """Listen and return the URL. port: 0 chooses a free one. tls: serve HTTPS with this certificate."""

        @web.middleware
        async def clock(request: web.Request, handler: Handler) -> web.StreamResponse:
            async def admitted(request: web.Request) -> web.StreamResponse:
                self._admit(request)
                return await handler(request)

            assert self.connections is not None
            return await self.connections.timed(request, guarded(admitted, self._report))

        app = web.Application(client_max_size=MAX_BODY, middlewares=[clock])
        app.add_routes(self._routes)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=STOP_S)
        connections = self.connections = app[CONNECTIONS] = Connections()
        await self._runner.setup()
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None
        options: dict[str, Any] = {"loop": loop, "access_log": None, "keepalive_timeout": IDLE_S}
        connections.server = lambda: _Requests(server, **options)
        self._server = await loop.create_server(
            self.connections,
            host,
            port,
            backlog=512,
            ssl=tls.context if tls is not None else None,
            ssl_handshake_timeout=HEADER_S if tls is not None else None,
        )
        self._sweeper = asyncio.create_task(self.connections.sweep(), name="connection deadlines")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{'http' if tls is None else 'https'}://{host}:{port}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        self._server.close()
        await self._runner.cleanup()
