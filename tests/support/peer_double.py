"""A node that serves one snapshot file over real HTTP, honestly or not, and writes down the ranges that it served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from headrace.bus.connection import Bus
from headrace.messages.weights import HeldFile, WeightPeer, peer_key


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
        self.begun = asyncio.Event()
        """A range of tensors was asked for."""
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def head(self) -> int:
        """Bytes before the tensors."""
        return 8 + int.from_bytes(self.data[:8], "little")

    async def start(self) -> None:
        """Listen on loopback."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

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
    """A double that HR_STATE names as the holder of a file, until the context ends. bus: of the role weight_sync."""
    double = PeerDouble(path)
    await double.start()
    values, key = await bus.kv("HR_STATE"), peer_key(run, node, "receiver")
    await values.put(key, WeightPeer(run=run, node=node, region=region, url=double.url, files=(held,)))
    try:
        yield double
    finally:
        await values.delete(key)
        await double.close()
