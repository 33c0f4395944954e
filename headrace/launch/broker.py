"""The broker of a run: a nats-server of its own, kept alive, or the one that `[bus] url` names.

A nats-server that dies is started again on the same port and the same store; actors reconnect by themselves, and what
was acknowledged is in the store.
"""

import asyncio
from collections.abc import Callable

from headrace.bus.errors import BusError
from headrace.bus.server import Server
from headrace.config import Config
from headrace.launch.children import KILLED, Intensity
from headrace.launch.runs import RunDir


class Broker:
    """`start`, then `watch` beside the run, then `stop`."""

    def __init__(self, config: Config, folder: RunDir) -> None:
        self.url = config.bus.url
        self.credentials = config.bus.credentials if config.bus.url else str(folder.broker / "credentials")
        self._server: Server | None = None
        if not config.bus.url:
            self._server = Server(folder.broker, port=config.bus.port, need_free=config.run.min_free_mb * 2**20 // 2)

    async def start(self) -> None:
        """Our own: until it answers. Declares the streams in any case. BusError."""
        from headrace.bus.connection import Bus
        from headrace.bus.streams import declare

        if self._server is not None:
            await self._server.start()
            self.url = self._server.url
        async with await Bus.connect(self.url, role="admin", credentials=self.credentials) as admin:
            await declare(admin)

    @property
    def pid(self) -> int:
        """Our own nats-server's process; 0 between two lives, and where the broker is somebody else's."""
        return self._server.pid if self._server is not None else 0

    async def watch(self, on_restart: Callable[[str, int], None]) -> None:
        """Keep our own running for as long as this is awaited. BusError when it ends too often."""
        if self._server is None:
            return
        intensity = Intensity(*KILLED)
        while True:
            code = await self._server.wait()
            if intensity.exceeded():
                raise BusError(f"nats-server keeps ending (code {code}); see {self._server.folder / 'log'}")
            on_restart("nats-server", code)
            await asyncio.sleep(intensity.pause_s())
            await self._server.start()

    async def stop(self) -> None:
        """End our own, in order."""
        if self._server is not None:
            await self._server.stop()
