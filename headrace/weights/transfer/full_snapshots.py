"""Brings full snapshots that are no chunks in the stream to this node: from folders that it can read, or from peers.

A full snapshot's manifest and the head that names it are in the stream as always; only the bits are elsewhere. So a
version, its order and its signature do not depend on who has the file.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from headrace.messages.weights import HeldFile, WeightManifest
from headrace.weights import shards as sharding
from headrace.weights.state import WeightError
from headrace.weights.transfer.fetching import Tell, fetch
from headrace.weights.transfer.incoming import IncomingFile
from headrace.weights.transfer.sources import LocalFile, Source

Look = Callable[[Collection[HeldFile]], AbstractAsyncContextManager[list[Source]]]
"""A place to look: files of which one suffices, to sources that are open in the context."""


class NoSource(WeightError):
    """No node and no folder has all blocks of a full snapshot; the text says what was asked."""


async def nothing() -> None:
    """Nobody asks this node for the file."""


class FullSnapshots:
    """Brings full snapshots from several places, one after the other until the file is complete."""

    def __init__(self, looks: Iterable[Look], where: str, tell: Tell) -> None:
        """where: the places in words, for `NoSource`. tell: gets a sentence for each source that fails."""
        self._looks, self._where, self._tell = tuple(looks), where, tell

    async def bring(
        self,
        manifest: WeightManifest,
        shards: frozenset[int] | None,
        path: Path,
        arrived: Callable[[], Awaitable[None]] = nothing,
    ) -> Path:
        """Fetch the file of a detached manifest, with every block verified, and give it the name `path`; returns it.

        arrived: called then, before a turn of the region is given back: a node that takes the turn next must find the
        file here. NoSource when blocks are left that nobody has: they are asked for alone the next time. OSError when
        the disk is full.
        """
        files = dict.fromkeys((manifest.state_hash, sharding.state_hash(manifest, shards)))
        held = [HeldFile(manifest.version, state_hash) for state_hash in files]
        asked = 0
        with IncomingFile(path, manifest, shards) as file:
            await asyncio.to_thread(file.open)
            async with AsyncExitStack() as looking:
                for look in self._looks:
                    if file.missing:
                        sources = await looking.enter_async_context(look(held))
                        asked += len(sources)
                        await fetch(file, sources, self._tell)
                if not file.missing:
                    await asyncio.to_thread(file.commit)
                    await arrived()
                    return path
            left = sum(piece.bytes for piece in file.missing)
            raise NoSource(
                f"nobody has {left} bytes of full snapshot {manifest.version} ({manifest.state_hash[:12]}) of run "
                f"{manifest.run}: asked {asked} of {self._where}"
            )


def shared_path(folder: str | Path, run: str, version: int, state_hash: str) -> Path:
    """The name of a full snapshot in the folder that all nodes share."""
    return Path(folder) / run / f"{version}-{state_hash}.safetensors"


def in_shared(folder: str | Path, run: str) -> Look:
    """Looks in the folder that all nodes share."""

    @asynccontextmanager
    async def look(files: Collection[HeldFile]) -> AsyncIterator[list[Source]]:
        paths = [shared_path(folder, run, file.version, file.state_hash) for file in files]
        yield [LocalFile(path) for path in paths if path.exists()]

    return look


def in_stores(folder: Path) -> Look:
    """Looks in the stores of a run's nodes that lie in this machine's folder of the run (``nodes/``). Their files are
    not hashed first: every block is, as it is read."""

    @asynccontextmanager
    async def look(files: Collection[HeldFile]) -> AsyncIterator[list[Source]]:
        names = {f"{file.version}.safetensors" for file in files}
        yield [LocalFile(path) for name in sorted(names) for path in sorted(folder.glob(f"*/*/{name}"))]

    return look
