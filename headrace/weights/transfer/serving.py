"""Serves the snapshot files of a node over HTTP, whole or in ranges, to nodes that know the run's secret.

``GET /weights/<version>/<state hash>`` answers with the file of exactly that state, and 404 when the node does not hold
it. Every request without the secret gets a 401, whatever its path. A file never changes, so a range of it is always of
the same state; one that the node drops while it is read is read to its end.

Plain HTTP: the receiver checks every block against a signed manifest, so nobody on the way can change weights, but they
can read them and the secret. A private network belongs around it.
"""

import hmac
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

STOP_S = 1.0
"""Seconds that requests get to finish when the server stops."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Find = Callable[[int, str], Path | None]
"""(version, state hash) to the path of a file with exactly that state, or None."""


class FileServer:
    """The HTTP server of one store. Call `start`, and `close` in any case."""

    def __init__(self, find: Find, token: str) -> None:
        """token: the secret that requests must carry."""
        self._find, self._token = find, token.encode()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. OSError when the port is taken."""
        app = web.Application(middlewares=[self._allowed])
        app.router.add_get("/weights/{version:[0-9]{1,15}}/{state_hash:[0-9a-f]{32}}", self._file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(64)
            self.port = listening.getsockname()[1]
            await web.SockSite(self._runner, listening.dup()).start()

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            raise web.HTTPUnauthorized(text="expected the secret of weight_peers.key")
        return await handler(request)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self._find(int(request.match_info["version"]), request.match_info["state_hash"])
        if path is None:
            raise web.HTTPNotFound(text="this node does not hold that state")
        return web.FileResponse(path)

    async def close(self) -> None:
        """Stop answering."""
        if self._runner is not None:
            await self._runner.cleanup()
