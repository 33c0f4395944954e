"""The host's side of a sandbox's way out: an allow-list, a log line per request, and nothing else.

A task may ask for names and ports (`Acquire.network`, such as ``pypi.org:443`` or ``*.debian.org:80``). The guest has
no network card and no resolver; its proxy (guest/tunnel.py) hands over a name and a port, and this side decides,
resolves and connects. What is not on the list is refused and logged like what is. An allowed name that leads to an
address of the host's own or of a private network is refused too, unless the list names that very address: who controls
a name does not get to choose a target behind the firewall.

Not seen here: what is said inside TLS. A server that forwards for others is as wide as what it forwards.
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
from headrace.vmhost.machine import OnEvent

_CONNECT_S, _WAIT_S = 20.0, 25.0
_PLACE = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w*.-]+)):(\d{1,5}|\*)", re.ASCII)


def check(places: Sequence[str]) -> None:
    """VmhostError for an entry that is not ``name:port``, with ``*`` in either."""
    for place in places:
        if not _PLACE.fullmatch(place):
            raise VmhostError(f"network: {place!r} is not name:port, such as pypi.org:443 or *.debian.org:80")


def _split(place: str) -> tuple[str, str]:
    found = _PLACE.fullmatch(place)
    if found is None:
        raise ValueError(f"{place!r} is not name:port")
    return (found[1] or found[2]).lower().rstrip("."), found[3]


class Gate:
    """Serves one sandbox. `allowed` are ``name:port`` patterns; `events` gets a line per request."""

    def __init__(self, channel: Channel, name: str, allowed: Sequence[str], events: OnEvent) -> None:
        check(allowed)
        self._channel, self._name, self._events = channel, name, events
        self._allowed = [_split(place) for place in allowed]
        self._job = 0
        self._records = Records()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._room: dict[int, int] = {}
        self._more = asyncio.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._feeding = asyncio.Lock()

    async def start(self) -> None:
        """Return when the sandbox's proxy listens; serve until the channel ends. SandboxLost."""
        answer, _ = await self._channel.call({"op": "network"}, (), _WAIT_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"{self._name}: the sandbox's proxy did not start: {answer.get('error')}")
        self._job = int(answer["job"])
        while not await self._turn():
            pass
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            with suppress(SandboxLost):
                while True:
                    await self._turn()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _turn(self) -> bool:
        """One piece of the proxy's output; whether it held anything."""
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
                self._room[stream] = min(WINDOW, self._room.get(stream, 0) + count)
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
        self._writers[stream], self._room[stream] = writer, WINDOW
        self._log(place, True, "")
        try:
            await self._feed(record(stream, OPENED))
            while data := await reader.read(32768):
                received += len(data)
                async with self._more:
                    await self._more.wait_for(lambda: self._room[stream] >= len(data))
                    self._room[stream] -= len(data)
                await self._feed(record(stream, DATA, data))
            await self._feed(record(stream, CLOSE))
        except (OSError, SandboxLost):
            with suppress(SandboxLost):
                await self._feed(record(stream, CLOSE))
        finally:
            del self._writers[stream], self._room[stream]
            writer.close()

    async def _connect(self, place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an allowed place. ValueError when it is not one; OSError, TimeoutError."""
        name, port = _split(place)
        if not any(fnmatchcase(name, known) and door in ("*", port) for known, door in self._allowed):
            raise ValueError(f"{place} is not on this task's list")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        for *_, pair in found:
            address = str(pair[0])
            meant = name in ("localhost", address) and any(known == name for known, _ in self._allowed)
            if meant or ipaddress.ip_address(address.partition("%")[0]).is_global:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, int(port))
        raise ValueError(f"{place} leads to an address inside, which the list does not name")

    async def _feed(self, data: bytes) -> None:
        header = {"op": "feed_job", "job": self._job, "last": False}
        async with self._feeding:
            answer, _ = await self._channel.call(header, (data,), _WAIT_S + 30.0)
        if not answer.get("ok", True):
            raise SandboxLost(f"{self._name}: the sandbox's proxy takes nothing: {answer.get('error')}")

    def _log(self, place: str, allowed: bool, why: str) -> None:
        text = f"{self._name}: {place} {'let through' if allowed else f'refused: {why}'}"
        self._events("network_request", text, {"sandbox": self._name, "place": place, "allowed": allowed})
