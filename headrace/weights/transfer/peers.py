"""Finds the nodes that hold a snapshot file, and lets only a few nodes of a region fetch from other regions at once.

The idea: every node that serves files names its address, region and files in HR_NODES. A node reads from nodes of its
own region while one has the file. Otherwise it takes one of the region's few turns and reads from other regions; the
nodes that get no turn wait until one in their region has the file. So a full snapshot crosses the long link as often as
a region has turns, and not once per node.

A turn is an entry whose revision fences it: a holder renews it while it fetches, and another node takes it over when it
has not changed for `STALE_S` by that node's own clock. Entries of nodes that died stay; asking them fails quickly.
"""

import asyncio
import ipaddress
import random
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from aiohttp import ClientSession, ClientTimeout

from headrace.messages.base import Message
from headrace.messages.weights import HeldFile, WeightPeer, WeightTurn, peer_key, turn_key
from headrace.weights.transfer.sources import CONNECT_S, QUIET_S, RemoteFile, Source

RENEW_S = 5.0
STALE_S = 30.0
"""Seconds without a renewal after which a turn may be taken over."""
_ADDRESS = re.compile(r"http://(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
LOOK_S = 1.0
"""Seconds between two looks of a node that waits for its turn."""


def is_address(url: str) -> bool:
    """Whether a node may be asked at an address that an entry names: plain HTTP, a host and a port and nothing else,
    and no address of the link, where clouds answer with a machine's credentials. The host may be this machine: several
    nodes may run on it."""
    match = _ADDRESS.fullmatch(url)
    if match is None or not 0 < int(match["port"]) < 65536:
        return False
    try:
        # inet_aton reads what resolvers take for an address, such as 2852039166 and 0xa9.0xfe.0xa9.0xfe.
        address = ipaddress.ip_address(match["six"] or socket.inet_aton(match["host"]))
    except OSError:
        return True
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return not (mapped.is_link_local or mapped.is_multicast or mapped.is_unspecified)


class KeyValue(Protocol):
    """The part of a bucket that peers need; `Refused` is what `create` and `update` raise."""

    async def create(self, key: str, message: Message) -> int:
        """Write if there is no such key."""

    async def update(self, key: str, message: Message, revision: int) -> int:
        """Write if the entry still has that revision; the new one."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove a key; with `revision`, only if the entry still has it."""

    async def items(self, pattern: str = ">") -> dict[str, tuple[Message, int]]:
        """Key to value and revision."""


class Peers:
    """The other nodes of a run."""

    def __init__(
        self,
        values: KeyValue,
        refused: type[Exception],
        *,
        run: str,
        node: str,
        region: str,
        token: str,
        turns: int,
        own: str = "",
    ) -> None:
        """values: HR_NODES. refused: raised by it when another node was faster. token: the secret that nodes share.
        turns: most nodes of a region that read from other regions at once; 0 takes no turns. own: address of this
        node's own files, which is not asked."""
        self._values, self._refused = values, refused
        self._run, self._node, self._region, self._token = run, node, region, token
        self._turns, self.own = turns, own
        self._seen: dict[str, tuple[int, float]] = {}
        """Key of a turn to the revision that was last seen, and when it was first seen (monotonic)."""

    async def holding(self, files: Collection[HeldFile]) -> list[tuple[WeightPeer, HeldFile]]:
        """The nodes that have one of these files, in random order."""
        out = []
        for value, _ in (await self._values.items(peer_key(self._run, "*", "*"))).values():
            if isinstance(value, WeightPeer) and value.url != self.own and is_address(value.url):
                out += [(value, file) for file in value.files if file in files][:1]
        random.shuffle(out)
        return out

    @asynccontextmanager
    async def near(self, files: Collection[HeldFile]) -> AsyncIterator[list[Source]]:
        """Sources of one of these files in this node's region."""
        async with AsyncExitStack() as stack:
            holding = [each for each in await self.holding(files) if each[0].region == self._region]
            yield await self._sources(holding, stack)

    @asynccontextmanager
    async def anywhere(self, files: Collection[HeldFile]) -> AsyncIterator[list[Source]]:
        """Sources in other regions, with one of the region's turns. Meanwhile another node of this region may get the
        file: then the sources are in this region."""
        async with AsyncExitStack() as stack:
            tried = {peer.url for peer, _ in await self.holding(files) if peer.region == self._region}
            taken = False
            while True:
                holding = await self.holding(files)
                near = [each for each in holding if each[0].region == self._region and each[0].url not in tried]
                if near or not holding or not self._turns or taken:
                    break
                # With a turn it looks once more: the node that had the turn may have named its file meanwhile.
                if not (taken := await self._take_turn(stack)):
                    await asyncio.sleep(LOOK_S)
            far = [each for each in holding if each[0].region != self._region]
            yield await self._sources(near or far, stack)

    async def _sources(self, holding: list[tuple[WeightPeer, HeldFile]], stack: AsyncExitStack) -> list[Source]:
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=QUIET_S)
        # Nothing is unpacked: a node could send a thousand times the memory that a piece may take.
        session = await stack.enter_async_context(ClientSession(timeout=timeout, auto_decompress=False))
        return [
            RemoteFile(session, peer.node, f"{peer.url}/weights/{file.version}/{file.state_hash}", self._token)
            for peer, file in holding
        ]

    async def _take_turn(self, stack: AsyncExitStack) -> bool:
        """Take one of the region's turns until `stack` closes. False when all are taken."""
        now, taken = time.monotonic(), await self._values.items(turn_key(self._run, self._region, 0)[:-1] + "*")
        mine = WeightTurn(node=self._node, holder=secrets.token_hex(8))
        for number in range(self._turns):
            key = turn_key(self._run, self._region, number)
            revision = taken[key][1] if key in taken else 0
            try:
                if not revision:
                    revision = await self._values.create(key, mine)
                else:
                    if self._seen.get(key, (0, 0.0))[0] != revision:
                        self._seen[key] = revision, now
                    if now - self._seen[key][1] < STALE_S:
                        continue
                    revision = await self._values.update(key, mine, revision)
            except self._refused:
                continue
            turn = _Turn(self._values, key, mine, revision, self._refused)
            stack.push_async_callback(turn.give_back)
            return True
        return False


class _Turn:
    """A turn that this node holds, renewed by a task until it is given back."""

    def __init__(self, values: KeyValue, key: str, mine: WeightTurn, revision: int, refused: type[Exception]) -> None:
        self._values, self._key, self._mine, self._revision, self._refused = values, key, mine, revision, refused
        self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(RENEW_S)
            beats += 1
            mine = WeightTurn(node=self._mine.node, holder=self._mine.holder, beats=beats)
            try:
                self._revision = await self._values.update(self._key, mine, self._revision)
            except self._refused:
                return  # the broker was away for long, and another node took the turn over

    async def give_back(self) -> None:
        """Stop renewing, and free the turn for another node."""
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            await self._values.delete(self._key, self._revision)
        except self._refused:
            return
