"""Hub and regions on loopback, as deploy/regions describes them, with links that can be cut."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.bus.broker import credentials, regions
from headrace.bus.broker.permissions import REGIONAL
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from tests.support.keys import as_writers


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Wire:
    """A TCP relay to `port` that can be cut: then connections break and new ones are refused."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def mend(self) -> None:
        """Let connections through."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break what is open and refuse what comes."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                to.write(data)
                await to.drain()
        to.close()
        self._open.discard(to)


class Region:
    """One region: its broker and its wire to the hub."""

    def __init__(self, name: str, server: Server, wire: Wire) -> None:
        self.name, self.server, self.wire = name, server, wire


class World:
    """A hub, and regions that join when a test wants them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = Server(folder / "hub", prepared=True)
        self.regions: dict[str, Region] = {}
        self._port = free_port()
        self._opened: list[Bus] = []

    async def start(self) -> None:
        """The hub with its streams."""
        regions.prepare_hub(self.folder / "hub", host="127.0.0.1", port=self._port)
        await self.hub.start()
        async with await as_writers(self.hub.url, self.hub.credentials) as admin:
            await declare(admin)

    async def join(self, name: str) -> Region:
        """A region's broker with its mirror."""
        wire = Wire(self._port)
        await wire.mend()
        key = self.hub.folder / regions.LINKS
        folder = regions.prepare_region(self.folder / name, name, f"nats-leaf://127.0.0.1:{wire.port}", key)
        credentials.trust(self.hub.credentials, folder / "credentials" / credentials.WRITERS, REGIONAL)
        region = self.regions[name] = Region(name, await Server(folder, prepared=True).start(), wire)
        async with await as_writers(region.server.url, region.server.credentials) as admin:
            await regions.declare_mirror(admin)
        return region

    async def connect(self, role: str = "admin", *, region: str = "", **options: Any) -> Bus:
        """A connection to the hub's broker, or to a region's."""
        server = self.regions[region].server if region else self.hub
        bus = await Bus.connect(server.url, role=role, credentials=server.credentials, **options)
        self._opened.append(bus)
        return bus

    async def hang_up(self) -> None:
        """Close the connections of a test."""
        for bus in self._opened:
            await bus.close()
        self._opened.clear()

    async def stop(self) -> None:
        """End everything."""
        for region in self.regions.values():
            await region.wire.cut()
            await region.server.stop()
        await self.hub.stop()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """A hub without regions, ended at the end."""
    out = World(folder)
    try:
        await out.start()
        yield out
        await out.hang_up()
    finally:
        await out.stop()
