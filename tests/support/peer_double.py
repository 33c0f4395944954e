"""A node that serves one snapshot file over real HTTP, honestly or not, and writes down the ranges that it served."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from headrace.bus.connection import Bus
from headrace.messages.weights import HeldFile, WeightPeer, peer_key
from tests.support.loopback import serving

Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class PeerDouble:
    """Serves a file's bytes. The attributes decide how it fails."""

    def __init__(self, path: Path):
        self.data = path.read_bytes()
        self.served: list[tuple[int, int]] = []
        """First byte and the byte after the last of each range of tensors."""
        self.dies_after = 1 << 30
        """Ranges of tensors that are answered; then the server ends in the middle of one."""
        self.wrong: set[int] = set()
        """Positions of bytes that it sends flipped."""
        self.gate: asyncio.Event | None = None
        """Answers wait for it."""
        self.instead: Answer | None = None
        """Gives the answer to a range of tensors in place of the right one. Its arguments: the request, the bytes."""
        self.begun = asyncio.Event()
        """A range of tensors was asked for."""

    @property
    def head(self) -> int:
        """Bytes before the tensors."""
        return 8 + int.from_bytes(self.data[:8], "little")

    def app(self) -> web.Application:
        """The application that answers."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1
        of_tensors = start >= self.head
        if of_tensors:
            self.begun.set()
            if self.gate is not None:
                await self.gate.wait()
        body = bytearray(self.data[start:end])
        for at in self.wrong:
            if start <= at < end:
                body[at - start] ^= 1
        if of_tensors and self.instead is not None:
            return await self.instead(request, bytes(body))
        if of_tensors and len(self.served) >= self.dies_after:
            response = web.StreamResponse(status=206, headers={"Content-Length": str(end - start)})
            await response.prepare(request)
            await response.write(bytes(body[: len(body) // 2]))
            assert request.transport is not None
            request.transport.abort()
            return response
        if of_tensors:
            self.served.append((start, end))
        return web.Response(status=206, body=bytes(body))


@asynccontextmanager
async def peer(
    bus: Bus, run: str, path: Path, held: HeldFile, *, node: str, region: str = "local"
) -> AsyncIterator[PeerDouble]:
    """A double that HR_NODES names as the holder of a file, until the context ends. bus: of the role weight_sync."""
    double = PeerDouble(path)
    values, key = await bus.kv("HR_NODES"), peer_key(run, node, "receiver")
    async with serving(double.app()) as url:
        await values.put(key, WeightPeer(run=run, node=node, region=region, url=url, files=(held,)))
        try:
            yield double
        finally:
            await values.delete(key)
