"""A folder of objects over real HTTP, with ranges, which notes what it served."""

import asyncio
from pathlib import Path

from aiohttp import web


class ObjectServer:
    """Serves the files of a folder; `serving(server.app())` starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served: list[tuple[int, int]] = []
        """First byte of each range, and the byte after its last."""
        self.begun = asyncio.Event()
        """A range was asked for."""
        self.gate = asyncio.Event()
        """Answers wait for it."""
        self.gate.set()

    @property
    def bytes(self) -> int:
        """Bytes served so far."""
        return sum(end - start for start, end in self.served)

    def app(self) -> web.Application:
        """The application that answers."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / request.match_info["path"]
        if not path.is_file():
            raise web.HTTPNotFound()
        wanted = request.http_range
        if wanted.stop is not None:
            self.begun.set()
            await self.gate.wait()
            self.served.append((wanted.start, min(wanted.stop, path.stat().st_size)))
        return web.FileResponse(path)
