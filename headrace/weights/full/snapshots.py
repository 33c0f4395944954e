"""Full snapshots: an object each at a location that all nodes reach, and one copy of it per region.

The idea: a full snapshot is encoded in chunks as every version is; only they follow each other in one object instead of
being records of the stream. Its signed manifest names every chunk with size and sha256. So the object's name and size
and the place of each chunk follow from the manifest, and the source of a byte does not matter.

The copy of a region is a file in a folder that the nodes of the region share (`region_dir`). The first node that needs
it takes a lock (flock), copies the object and verifies every chunk; the others wait, then read the copy. So an object
crosses the link to the location once per region, however many nodes start at once. The lock ends with its process. What
a killed node had copied is verified and stays; the next one continues after it.

Trade-offs: without `region_dir` every node reads the location, and a fetch that was interrupted begins anew.
"""

import asyncio
import fcntl
import hashlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from headrace.messages.weights import ChunkInfo, WeightManifest
from headrace.weights.ahead import Ahead
from headrace.weights.full.location import Location, NoSnapshot
from headrace.weights.pieces import pieces
from headrace.weights.publishing.encoding import Encoding, describe

AHEAD = 6
"""Pieces that are read at once."""
READ_S = 120.0
"""Longest time in seconds for one piece."""
LOOK_S = 0.2
"""Seconds between two looks of a node that waits for another one's copy."""
STALLED_S = READ_S + 30.0
"""Seconds without a new byte after which another node's copy is not waited for."""
COPIES = 2
"""Copies of a region that stay beside the newest one."""

P = ParamSpec("P")
T = TypeVar("T")
Tell = Callable[[str], Awaitable[None]]
"""Reports a copy or a folder that cannot be used, as one sentence."""


def name_of(version: int, chunks: Sequence[ChunkInfo]) -> str:
    """The name of the object with these chunks. Another order of chunks is another object."""
    return f"{version}-{hashlib.sha256(''.join(info.sha256 for info in chunks).encode()).hexdigest()[:32]}.chunks"


async def store(location: Location, encoding: Encoding, version: int, folder: Path) -> list[ChunkInfo]:
    """Encode a full snapshot into an object; the entries of its manifest, in the object's order. folder: for the file
    that becomes the object. NoSnapshot; OSError when the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    made, chunks = encoding.pieces(), list[ChunkInfo]()
    numbers = [itertools.count() for _ in encoding.parts]
    path = folder / f".{version}.chunks.part"
    try:
        with path.open("wb") as file:  # not in a thread: a cancelled wait would leave the file open

            def step() -> bool:
                if (piece := next(made, None)) is None:
                    return False
                shard, data = piece
                file.write(data)
                chunks.append(describe(data, shard, next(numbers[shard]), 0))
                return True

            while await asyncio.to_thread(step):
                pass
        await asyncio.to_thread(location.put, path, name_of(version, chunks))
        return chunks
    finally:
        path.unlink(missing_ok=True)


class _Object:
    """An object: its name, and where its chunks are."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.name = name_of(manifest.version, manifest.chunks)
        self.chunks = manifest.chunks
        ends = itertools.accumulate((info.bytes for info in manifest.chunks), initial=0)
        self.starts = {(info.shard, info.seq): start for info, start in zip(manifest.chunks, ends, strict=False)}
        self.bytes = sum(info.bytes for info in manifest.chunks)

    def span(self, piece: Sequence[ChunkInfo]) -> tuple[int, int]:
        """First byte of a piece, and the byte after its last."""
        start = self.starts[piece[0].shard, piece[0].seq]
        return start, start + sum(info.bytes for info in piece)


def _cut(data: bytes, piece: Sequence[ChunkInfo]) -> list[bytes]:
    ends = list(itertools.accumulate(info.bytes for info in piece))
    return [data[end - info.bytes : end] for info, end in zip(piece, ends, strict=True)]


def _good(data: bytes, info: ChunkInfo) -> bool:
    return hashlib.sha256(data).hexdigest() == info.sha256


class FullSnapshots:
    """Reads full snapshots: from the copy of this node's region, or from the location."""

    def __init__(self, location: Location, region: Path | None, tell: Tell) -> None:
        """region: the folder with the region's copies of the run's objects; None: there is none."""
        self.location, self._region, self._tell = location, region, tell
        self._object: _Object | None = None
        self._sized: set[str] = set()
        """Names of objects that have the manifest's size at the location."""
        self._refused: set[str] = set()
        """Names of objects without a usable copy in the region."""

    async def fetch(self, manifest: WeightManifest, piece: Sequence[ChunkInfo]) -> list[bytes]:
        """The bytes of chunks that follow each other in the object of a manifest. The caller compares their hashes.
        NoSnapshot."""
        if self._object is None or self._object.chunks is not manifest.chunks:
            self._object = await asyncio.to_thread(_Object, manifest)
        where = self._object
        copy = await self._copy(where)
        if copy is not None:
            parts = await asyncio.to_thread(_from_copy, copy, where, piece)
            if parts is not None:
                return parts
            if where.name not in self._refused:
                self._refused.add(where.name)
                copy.unlink(missing_ok=True)
                await self._tell(f"{copy} is damaged: removed, reading {self.location.url}")
        return _cut(await self._far(where, piece), piece)

    async def _far(self, where: _Object, piece: Sequence[ChunkInfo]) -> bytes:
        """Bytes of a piece at the location, of an object that has the right size."""
        if where.name not in self._sized:
            size = await self._within(self.location.size, where.name)
            if size is None:
                raise NoSnapshot(f"{self.location.url} has no {where.name}")
            if size != where.bytes:
                raise NoSnapshot(f"{self.location.url}/{where.name} has {size} bytes, expected {where.bytes}")
            self._sized.add(where.name)
        return await self._within(self.location.read, where.name, *where.span(piece))

    async def _within(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.to_thread(call, *args, **kwargs)
        except TimeoutError:
            raise NoSnapshot(f"{self.location.url} did not answer within {READ_S:g} s") from None

    async def _copy(self, where: _Object) -> Path | None:
        """The region's copy of an object, which this node makes if no other does; None without a usable one."""
        if self._region is None or where.name in self._refused:
            return None
        path, part = self._region / where.name, self._region / f".{where.name}.part"
        seen, since = -1, time.monotonic()
        try:
            while not await asyncio.to_thread(path.exists):
                lock = await asyncio.to_thread(_lock, self._region)
                if lock is None:
                    size = part.stat().st_size if part.exists() else 0
                    if size != seen:
                        seen, since = size, time.monotonic()
                    elif time.monotonic() - since > STALLED_S:
                        raise OSError(f"the node that makes it has written nothing for {STALLED_S:g} s")
                    await asyncio.sleep(LOOK_S)
                    continue
                try:
                    if not await asyncio.to_thread(path.exists):
                        await self._fill(where, part, path)
                finally:
                    lock.close()
        except OSError as error:
            self._refused.add(where.name)
            await self._tell(f"no copy in {self._region}: {error.strerror or error}; reading {self.location.url}")
            return None
        return path

    async def _fill(self, where: _Object, part: Path, path: Path) -> None:
        """Copy an object by way of `part` to `path`, with every chunk verified. The lock is held."""
        try:
            left = where.chunks[await asyncio.to_thread(_keep_whole, part, where) :]
            cut = list(pieces(left))
            async with Ahead((partial(self._far, where, piece) for piece in cut), AHEAD) as reads:
                for piece in cut:
                    await asyncio.to_thread(_append, part, piece, _cut(await reads.next(), piece), self.location.url)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        await asyncio.to_thread(_take, part, path)


def _lock(folder: Path) -> BinaryIO | None:
    """The lock of a folder of copies, until it is closed; None when another node holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise


def _keep_whole(part: Path, where: _Object) -> int:
    """Cut a file after its first chunks that are whole and right; their number."""
    with open(part, "ab+") as file:
        file.seek(0)
        count = end = 0
        for info in where.chunks:
            data = file.read(info.bytes)
            if len(data) < info.bytes or not _good(data, info):
                break
            count, end = count + 1, end + info.bytes
        file.truncate(end)
    return count


def _append(part: Path, piece: Sequence[ChunkInfo], parts: Sequence[bytes], url: str) -> None:
    with open(part, "ab") as file:
        for info, data in zip(piece, parts, strict=True):
            if not _good(data, info):
                raise NoSnapshot(f"{url} sent other bytes than chunk {info.seq} of shard {info.shard} has")
            file.write(data)


def _take(part: Path, path: Path) -> None:
    """Give a complete copy its name, and remove old ones."""
    os.replace(part, path)
    folder = Location(str(path.parent))
    held = folder.versions()
    for name in sorted(held, key=lambda name: held[name])[: -COPIES - 1]:
        if name != path.name:
            folder.remove(name)


def _from_copy(path: Path, where: _Object, piece: Sequence[ChunkInfo]) -> list[bytes] | None:
    """The chunks of a piece from a copy; None when it does not have them."""
    start, end = where.span(piece)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            parts = _cut(file.read(end - start), piece)
    except OSError:
        return None
    return parts if all(map(_good, parts, piece)) else None
