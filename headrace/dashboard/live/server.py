"""Serves the live page over HTTP: static files, the settings with which it reads the broker, and records.

The page itself connects to the broker's WebSocket. It gets the seed of the role `web`, which publishes nothing and
subscribes to records without users' data; records of the past come from this process.

Everything but the static files, which hold no data, needs the page's key. The address that an operator opens has it in
its fragment, which browsers send to nobody; the page takes it out of the address, keeps it in the tab's session storage
and sends it in a header. It is no cookie: those of a host go to every port, so a program of another user of the machine
would get it. Requests of other names and other origins are refused, so a page of another site or port gets no file
either.
"""

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from headrace.bus.broker import websocket
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.dashboard.live import history
from headrace.dashboard.live.access import Access, Scope
from headrace.dashboard.live.attempt import NoSuchAttempt, Originals, describe, find
from headrace.dashboard.live.panels import PANELS

STATIC = Path(__file__).with_name("static")
STATIC_FILES = "/{name}"
"""The route of static files, which needs no key."""
AFTER = "expected after=<sequence>"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src data:; "
    "connect-src 'self' {websocket}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy. Bars have their lengths in style attributes; no script or sheet stands in the page."""


class Address:
    """A listening socket that exists before the broker starts: the broker admits the page's origin by its port."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """port 0 takes a free one. tls: serve https with it. BusError when the port is taken."""
        self.host, self.tls = host, tls
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(64)
        except OSError as error:
            self.socket.close()
            raise BusError(
                f"port {port} on {host} is taken ({error.strerror}): choose another [dashboard] port, or 0 for any"
            ) from None
        self.port: int = self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """The page's address."""
        return websocket.address(self.scheme, self.host, self.port) + "/"

    @property
    def scheme(self) -> str:
        """http or https."""
        return "https" if self.tls is not None else "http"

    @property
    def origins(self) -> list[str]:
        """Origins of pages that this address serves."""
        return websocket.origins_of(self.host, self.port, self.scheme)


class LivePage:
    """The HTTP server of one run's page. Call `start`, and `close` in any case."""

    def __init__(
        self, config: Config, run: str, bus: Bus, *, websocket: str, seed: str, started: float, originals: Originals
    ) -> None:
        """websocket: ws:// or wss:// address of the broker. seed: of the role `web`. started: a Unix time, seconds."""
        self.config, self.run, self.bus = config, run, bus
        self.websocket, self._seed, self._started, self._originals = websocket, seed, started, originals
        self.access = Access()
        self._hosts: set[str] = set()
        self._origins: set[str] = set()
        self._headers = HEADERS | {"Content-Security-Policy": POLICY.format(websocket=websocket)}
        self._runner: web.AppRunner | None = None

    async def start(self, address: Address) -> None:
        """Serve on an address."""
        self._origins = set(address.origins)
        self._hosts = {origin.partition("://")[2] for origin in address.origins}
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/config.json", self._settings)
        app.router.add_get("/api/steps", self._steps)
        app.router.add_get("/api/history", self._history)
        app.router.add_get("/api/trajectory/{seq:[0-9]{1,15}}", self._trajectory)
        app.router.add_get(f"/api/panel/{{name:{'|'.join(PANELS)}}}", self._panel)
        app.router.add_get(STATIC_FILES.replace("}", ":[A-Za-z.]*}"), self._static)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, address.socket, ssl_context=address.tls).start()

    async def close(self) -> None:
        """Stop answering."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        answer = self._refused(request)
        if answer is None:
            try:
                answer = await handler(request)
            except BusError as error:
                answer = web.Response(status=503, text=f"the broker does not answer: {error}")
            except web.HTTPException as error:
                answer = web.Response(status=error.status, text=error.reason)
        answer.headers.update(self._headers)
        return answer

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to a request that no handler may see."""
        headers = request.headers
        if headers.getall("Host", []) not in [[host] for host in self._hosts] or not request.raw_path.startswith("/"):
            return web.Response(status=403, text=f"this page is {' or '.join(sorted(self._hosts))}")
        opened = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not opened
        if foreign or not {*headers.getall("Origin", [])} <= self._origins:
            return web.Response(status=403, text="pages of another origin may not ask here")
        resource = request.match_info.route.resource
        if (resource is None or resource.canonical != STATIC_FILES) and not self._scope(request):
            text = "this needs the page's key: open the address that `headrace dashboard RUN` prints"
            return web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        return None

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"] or "index.html"
        path = STATIC / name
        if path.suffix not in KINDS or not path.is_file():
            return web.Response(status=404, text=f"there is no {name}")
        return web.Response(body=path.read_bytes(), content_type=KINDS[path.suffix], charset="utf-8")

    async def _settings(self, _: web.Request) -> web.StreamResponse:
        config = self.config
        cuda = config.trainer.device.startswith("cuda")
        return web.json_response(
            {
                "run": self.run,
                "websocket": self.websocket,
                "seed": self._seed,
                "started": self._started,
                "steps": config.curriculum.steps,
                "batch": config.curriculum.groups_per_step * config.curriculum.group_size,
                "gpu_hour": config.dashboard.gpu_hour,
                "core_hour": config.dashboard.core_hour,
                "gpus": int(cuda),
                "cores": os.cpu_count(),
            }
        )

    def _scope(self, request: web.Request) -> Scope:
        given = request.headers.getall("Authorization", [])
        return self.access.scope(given[0]) if len(given) == 1 else ""

    async def _steps(self, request: web.Request) -> web.StreamResponse:
        after = _after(request)
        if after is None:
            return web.Response(status=400, text=AFTER)
        return _json(await history.steps(self.bus, self.run, after))

    async def _history(self, request: web.Request) -> web.StreamResponse:
        users = self._scope(request) == "users"
        records = await history.records(self.bus, self.run, users=users)
        return _json({"records": records, "users": users})

    async def _panel(self, request: web.Request) -> web.StreamResponse:
        after = _after(request)
        if after is None:
            return web.Response(status=400, text=AFTER)
        panel = await PANELS[request.match_info["name"]](self.bus, self.run, after)
        return _json(panel)

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        seq = int(request.match_info["seq"])
        try:
            made = await find(self.bus, self.run, seq)
            if made.lane == "production" and self._scope(request) != "users":
                return web.Response(
                    status=403,
                    text="this attempt belongs to a user: open the page with a token of `headrace dashboard --users`",
                )
            described = await describe(self.bus, self.run, seq, made, self._originals)
        except NoSuchAttempt as error:
            return web.Response(status=404, text=str(error))
        body = await asyncio.to_thread(msgspec.json.encode, described)
        return web.Response(body=body, content_type="application/json")


def _json(value: object) -> web.Response:
    """A value as JSON; figures that are no numbers become null, which json.dumps would write as no browser reads it."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _after(request: web.Request) -> int | None:
    """The query's `after`, 0 without one; None for a value that is no sequence."""
    after = request.query.get("after", "0")
    return int(after) if after.isascii() and after.isdigit() and len(after) < 16 else None
