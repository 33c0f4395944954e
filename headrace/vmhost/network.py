"""The host's side of a sandbox's network access: an allow-list, and an event per request.

A task may list destinations (`Acquire.network`, such as ``pypi.org:443`` or ``*.debian.org:80``). The guest has no
network card and no resolver; its proxy (guest/tunnel.py) sends a name and a port, and this side decides, resolves and
connects. Requests are logged whether they are allowed or refused. A listed place at an address of the host or of a
private network is refused too, unless `[environment] private_places` of this node names it: neither a task's author
nor the owner of a name chooses targets behind the firewall.

The content of TLS connections is not inspected. A listed server that forwards requests extends the list to its targets.
"""

import asyncio
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.backend import OnEvent
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.tunnel import (
    CLOSE,
    DATA,
    LIMIT,
    OPEN,
    OPENED,
    REFUSED,
    STREAMS,
    TAKEN,
    WINDOW,
    Records,
    record,
)

_CONNECT_S, _WAIT_S = 20.0, 25.0
_PLACE = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w*.-]+)):(\d{1,5}|\*)", re.ASCII)


def check(places: Sequence[str]) -> None:
    """VmhostError unless every entry is ``name:port``, with ``*`` allowed in either."""
    for place in places:
        if not _PLACE.fullmatch(place):
            raise VmhostError(f"network: expected name:port, such as pypi.org:443 or *.debian.org:80, got {place!r}")


def _split(place: str) -> tuple[str, str]:
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ValueError(f"expected name:port, got {place!r}")
    return (match[1] or match[2]).lower().rstrip("."), match[3]


def _matches(places: Sequence[tuple[str, str]], name: str, port: str) -> bool:
    return any(fnmatchcase(name, pattern) and allowed in ("*", port) for pattern, allowed in places)


class NetworkGate:
    """Network access of one sandbox. `allowed` are ``name:port`` patterns, and `private` those of the operator for
    addresses that are not public; `events` receives each request."""

    def __init__(
        self, channel: Channel, name: str, allowed: Sequence[str], private: Sequence[str], events: OnEvent
    ) -> None:
        check((*allowed, *private))
        self._channel, self._name, self._events = channel, name, events
        self._allowed = [_split(place) for place in allowed]
        self._private = [_split(place) for place in private]
        self._job = 0
        self._records = Records()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._window: dict[int, int] = {}
        self._more = asyncio.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._feeding = asyncio.Lock()

    async def start(self) -> None:
        """Start the sandbox's proxy and return when it listens; it is served until the channel ends. SandboxLost."""
        answer, _ = await self._channel.call({"op": "network"}, (), _WAIT_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"{self._name}: the sandbox's proxy did not start: {answer.get('error')}")
        self._job = int(answer["job"])
        while not await self._receive():
            pass
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            with suppress(SandboxLost):
                while True:
                    await self._receive()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _receive(self) -> bool:
        """Handle the next piece of the proxy's output; False when there was none within the wait."""
        header = {"op": "follow_job", "job": self._job, "wait_s": _WAIT_S / 2, "limit": LIMIT}
        answer, bodies = await self._channel.call(header, (), _WAIT_S + 30.0)
        if not answer.get("running"):
            raise SandboxLost(f"{self._name}: the sandbox ended its proxy")
        try:
            for stream, kind, payload in self._records.feed(bodies[0]):
                await self._record(stream, kind, payload)
        except (ValueError, IndexError, struct.error) as error:
            self._channel.close(f"it broke the protocol: {error}")
            raise SandboxLost(f"{self._name}: {error}") from None
        return bool(bodies[0])

    async def _record(self, stream: int, kind: int, payload: bytes) -> None:
        if kind == OPEN and len(self._tasks) >= STREAMS:
            await self._feed(record(stream, REFUSED, b"too many connections at once"))
        elif kind == OPEN and stream not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._relay(stream, payload.decode("ascii", "replace")))
            self._tasks[stream] = task
            task.add_done_callback(lambda _: self._tasks.pop(stream, None))
        elif kind == DATA and stream in self._writers:
            writer = self._writers[stream]
            with suppress(OSError):
                writer.write(payload)
                await writer.drain()
        elif kind == TAKEN:
            (count,) = struct.unpack("!I", payload)
            async with self._more:
                self._window[stream] = min(WINDOW, self._window.get(stream, 0) + count)
                self._more.notify_all()
        elif kind == CLOSE and stream in self._tasks:
            self._tasks[stream].cancel()

    async def _relay(self, stream: int, place: str) -> None:
        received = 0
        try:
            reader, writer = await self._connect(place)
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or "no answer"
            self._log(place, False, reason)
            await self._feed(record(stream, REFUSED, reason.encode()[:1000]))
            return
        self._writers[stream], self._window[stream] = writer, WINDOW
        self._log(place, True, "")
        try:
            await self._feed(record(stream, OPENED))
            while data := await reader.read(32768):
                received += len(data)
                async with self._more:
                    await self._more.wait_for(lambda: self._window[stream] >= len(data))
                    self._window[stream] -= len(data)
                await self._feed(record(stream, DATA, data))
            await self._feed(record(stream, CLOSE))
        except (OSError, SandboxLost):
            with suppress(SandboxLost):
                await self._feed(record(stream, CLOSE))
        finally:
            del self._writers[stream], self._window[stream]
            writer.close()

    async def _connect(self, place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a listed destination. ValueError when it is not listed; OSError, TimeoutError."""
        name, port = _split(place)
        if not _matches(self._allowed, name, port):
            raise ValueError(f"{place} is not on this task's list")
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        for *_, pair in addresses:
            address = str(pair[0])
            public = ipaddress.ip_address(address.partition("%")[0]).is_global
            if public or _matches(self._private, name, port):
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, int(port))
        raise ValueError(f"{place} has a private address, and the node's [environment] private_places do not name it")

    async def _feed(self, data: bytes) -> None:
        header = {"op": "feed_job", "job": self._job, "last": False}
        async with self._feeding:
            answer, _ = await self._channel.call(header, (data,), _WAIT_S + 30.0)
        if not answer.get("ok", True):
            raise SandboxLost(f"{self._name}: the sandbox's proxy does not accept data: {answer.get('error')}")

    def _log(self, place: str, allowed: bool, why: str) -> None:
        text = f"{self._name}: {place} {'allowed' if allowed else f'refused: {why}'}"
        self._events("network_request", text, {"sandbox": self._name, "place": place, "allowed": allowed})
