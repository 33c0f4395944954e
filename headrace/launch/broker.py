"""The broker of a run: a nats-server that is kept alive, or the broker that `[bus] url` names.

A nats-server that dies is restarted on the same port and store. Actors reconnect by themselves; acknowledged messages
are in the store. Such a broker holds one run and its branch. Runs that share the broker of `[bus] url` sign in to an
account each, if `[bus] credentials` holds accounts.
"""

from collections.abc import Callable, Sequence

from headrace.bus.broker import credentials
from headrace.bus.broker.server import Server
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.launch.runs import RunDir
from headrace.launch.supervision.children import ChildFailed, keep_alive


class Broker:
    """Call `start`, then `watch` during the run, then `stop`."""

    def __init__(self, config: Config, folder: RunDir, origins: Sequence[str] = ()) -> None:
        """origins: pages that may connect to the own nats-server."""
        self.url, self._sizes = config.bus.url, config.bus.stream_bytes
        made_here = str(folder.broker / "credentials")
        self.credentials = credentials.of_run(config.bus.credentials, folder.id) if config.bus.url else made_here
        self._server: Server | None = None
        if not config.bus.url:
            need_free = config.run.min_free_mb * 2**20 // 2
            self._server = Server(folder.broker, port=config.bus.port, need_free=need_free, origins=origins)

    async def start(self) -> None:
        """Start the own nats-server and wait until it answers; declare the streams in any case. BusError."""
        from headrace.bus.connection import Bus
        from headrace.bus.nats.streams import declare

        if self._server is not None:
            await self._server.start()
            self.url = self._server.url
        async with await Bus.connect(self.url, role="admin", credentials=self.credentials) as admin:
            await declare(admin, sizes=self._sizes)

    @property
    def websocket(self) -> str:
        """ws:// address of the own nats-server; empty without one."""
        return self._server.websocket if self._server is not None else ""

    @property
    def pid(self) -> int:
        """Process id of the own nats-server; 0 while it is down and when `[bus] url` names another broker."""
        return self._server.pid if self._server is not None else 0

    async def watch(self, on_restart: Callable[[str, str], None]) -> None:
        """Keep the own nats-server running for as long as this is awaited. BusError when it ends too often."""
        if self._server is not None:
            try:
                await keep_alive(self._server, on_restart, for_good=())
            except ChildFailed as failure:
                raise BusError(str(failure)) from None

    async def stop(self) -> None:
        """Stop the own nats-server."""
        if self._server is not None:
            await self._server.stop()
