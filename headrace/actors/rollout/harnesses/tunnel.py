"""Carries the connections of a sandbox's loopback to an HTTP protocol in this process.

The sandbox's end (vmhost/guest/tunnel.py) is a job: what it writes are records of connections, and records are its
input. So the tunnel needs nothing but the calls of a sandbox, on every backend and from any node.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

from headrace.messages.sandbox import FeedJob, FollowJob, Sandbox, StartEndpoint
from headrace.vmhost.guest.tunnel import CLOSE, DATA, LIMIT, OPEN, TAKEN, WINDOW, Records, record

WAIT_S = 20.0
"""Seconds that a call waits for the next record."""
TOGETHER_S = 0.001
"""Seconds that a record waits for more: an answer and the end of its connection are then one call."""


class Tunnel:
    """The endpoint of one sandbox: `open`, then `serve` until it is cancelled or the sandbox ends."""

    def __init__(self, sandbox: Sandbox, protocol: Callable[[], asyncio.Protocol]) -> None:
        """protocol: makes the protocol of a connection."""
        self._sandbox, self._protocol = sandbox, protocol
        self._connections: dict[int, _Connection] = {}
        self._records = Records()
        self._unsent = b""
        self._news = asyncio.Event()
        self._job = 0

    async def open(self) -> tuple[str, str]:
        """Listen in the sandbox, and make a home there; the URL and the home's path. EndpointError, SandboxLost."""
        started = await self._sandbox.call(StartEndpoint())
        if not started.ok:
            raise EndpointError(started.error)
        self._job = started.job
        address, _, home = started.stdout.partition("\n")
        return f"http://{address}", home

    async def serve(self) -> None:
        """Carry records. Returns when the sandbox's end of the tunnel has ended, which only its programs can do.
        SandboxLost."""
        feeding = asyncio.create_task(self._feed())
        try:
            while True:
                done = await self._sandbox.call(FollowJob(job=self._job, wait_s=WAIT_S, limit=LIMIT, raw=True))
                try:
                    for number, kind, payload in self._records.feed(done.data):
                        self._take(number, kind, payload)
                except (ValueError, struct.error):  # another program of the sandbox wrote these
                    return
                if not done.running or feeding.done():
                    return
        finally:
            feeding.cancel()
            for connection in list(self._connections.values()):
                connection.end()

    def send(self, data: bytes) -> None:
        """Send a record, together with those that come before it can be sent."""
        self._unsent += data
        self._news.set()

    def over(self, number: int) -> None:
        """A connection has ended on this side."""
        self._connections.pop(number, None)

    async def _feed(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER_S)
            self._news.clear()
            data, self._unsent = self._unsent, b""
            if not (await self._sandbox.call(FeedJob(job=self._job, data=data, raw=True))).ok:
                return

    def _take(self, number: int, kind: int, payload: bytes) -> None:
        if kind == OPEN and number not in self._connections:
            self._connections[number] = _Connection(self, number, self._protocol())
        elif (connection := self._connections.get(number)) is None:
            return
        elif kind == DATA:
            connection.protocol.data_received(payload)
        elif kind == TAKEN:
            connection.taken(*struct.unpack("!I", payload))
        elif kind == CLOSE:
            connection.end()


class EndpointError(Exception):
    """The sandbox cannot listen; the text says why."""


class _Connection(asyncio.Transport):
    """One connection, as its protocol sees it. At most a window of its bytes is on the way to the sandbox; a body that
    comes faster than it is read is bounded by its limit."""

    def __init__(self, tunnel: Tunnel, number: int, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self._tunnel, self._number = tunnel, number
        self._window, self._waiting = WINDOW, b""
        self._closing = self._over = False
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Part of asyncio's transport."""
        if not self._over:
            self._waiting += bytes(data)
            self._flush()

    def taken(self, count: int) -> None:
        """The sandbox has delivered `count` bytes."""
        self._window = min(WINDOW, self._window + count)
        self._flush()

    def _flush(self) -> None:
        data, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
        self._window -= len(data)
        if data:
            self._tunnel.send(record(self._number, DATA, data))
        if self._closing and not self._waiting:
            self.abort()

    def close(self) -> None:
        """Close it once all is sent."""
        self._closing = True
        self._flush()

    def abort(self) -> None:
        """Close it at once."""
        if not self._over:
            self._tunnel.send(record(self._number, CLOSE))
            self.end()

    def end(self) -> None:
        """It is closed."""
        if not self._over:
            self._over = self._closing = True
            self._tunnel.over(self._number)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        """Whether it is closed or closes."""
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Nothing is known about the other end."""
        return default
