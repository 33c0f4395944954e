"""The host's end of a slot's port: calls go out, answers come back in any order, and every call has a deadline.

The guest is not trusted. An answer without a call, a frame that is too large or unreadable, and an answer that misses
its deadline each end this channel, and with it only the sandbox that uses it.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any, cast

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.guest.frames import Garbage, Reader, parts, start

ENDED = "the sandbox was ended by its own programs, or they kept it from answering; nothing works in it any more"
"""The sentence that a policy reads when its programs ended its sandbox."""
TICK_S = 1.0
"""A wait for an answer is measured in such pieces: one that took longer counts as one."""


class Channel(asyncio.Protocol):
    """One port. Create it by `connect`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hung_up = False
        """Whether the guest's side closed the channel."""
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[bytes]]]] = {}
        self._reader = Reader()
        self._next = 0

    @classmethod
    async def connect(cls, end: socket.socket, name: str) -> "Channel":
        """A channel over a connected Unix stream socket, which it owns from then on."""
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(name), sock=end)
        return channel

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._waiting)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol."""
        if not self._waiting:
            self.close("it sent data although no call was open")
            return
        try:
            for header, bodies in self._reader.feed(data):
                number = header.pop("i", None)
                future = self._waiting.pop(number, None) if isinstance(number, int) else None
                if future is None:
                    raise Garbage("an answer without a call")
                if not future.done():
                    future.set_result((header, bodies))
        except Garbage as garbage:
            self.close(f"it broke the protocol: {garbage}")

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self.hung_up = not self.lost.done()
        self.close("its channel closed")
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self, reason: str) -> None:
        """End the channel; all open calls fail with the reason. Idempotent: the first reason stays."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(f"{self.name}: {reason}"))
                future.exception()  # marks it as retrieved: the caller may have given up

    async def call(
        self, header: dict[str, Any], bodies: Sequence[bytes] = (), timeout: float = 30.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a frame and wait `timeout` seconds for its answer. SandboxLost when the channel has ended or ends."""
        self._next += 1
        return await self._send(self._next, parts({"i": self._next} | header, bodies), timeout)

    async def start(self, nanoseconds: int, entropy: bytes, timeout: float) -> dict[str, Any]:
        """Send START, a clone's first message: the time, and entropy or b"". One such call at a time. SandboxLost."""
        return (await self._send(0, [start(nanoseconds, entropy)], timeout))[0]

    async def _send(self, number: int, message: list[bytes], timeout: float) -> tuple[dict[str, Any], list[bytes]]:
        if self.lost.done():
            raise SandboxLost(f"{self.name}: {self.lost.result()}")
        assert self._transport is not None
        future: asyncio.Future[tuple[dict[str, Any], list[bytes]]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.writelines(message)
        left = timeout
        while left > 0 and not future.done():
            began = time.monotonic()
            await asyncio.wait({future}, timeout=min(left, TICK_S))
            # Time in which this process itself did not run is not the guest's.
            left -= min(time.monotonic() - began, TICK_S)
        if not future.done():
            self.close(f"no answer within {timeout:g} s")
        return await future
