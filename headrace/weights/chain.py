"""The chain of versions in the stream: plans the way to a version and builds the version along it.

Receivers, a sender that lost its base, auditors and late joiners use this module.

The idea: a head record names its manifest by stream sequence, and a manifest names that of its base. So every manifest
on the way was committed by a head. A version is built from the newest full snapshot by the deltas after it, in order,
or by the deltas from a file that the node has, where these are fewer bytes. The deltas are applied forward into one
staged file.

The caller passes the bus as a `StreamSource`, which returns messages by sequence or subject. With a `Trust`, only
manifests that a known publisher signed are followed.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.messages import subjects
from headrace.messages.weights import ChunkInfo, WeightChunk, WeightHead, WeightManifest
from headrace.weights import shards as sharding
from headrace.weights import signing
from headrace.weights.ahead import Ahead
from headrace.weights.pieces import pieces
from headrace.weights.receiving.staging import BrokenVersion, DamagedChunk, StagedFile, check_manifest
from headrace.weights.signing import Trust
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError

STREAM = "HR_WEIGHTS"
AHEAD = 8
"""Chunks of the stream, or pieces of an object, that are read before they are needed."""
ASKS = "full_snapshot"
"""In the event of a receiver that cannot build a version from its records: it asks the sender for a full snapshot."""
TRIES = 3
"""Attempts to fetch a chunk that does not match its manifest."""

Find = Callable[[int, str], Path | None]
"""(version, state hash) to the path of a file with exactly that state, or None."""
Fetch = Callable[[WeightManifest, Sequence[ChunkInfo]], Awaitable[list[bytes]]]
"""Reads chunks that follow each other in the object of a full snapshot; `full.snapshots.FullSnapshots.fetch` is one."""


class StoredRecord(Protocol):
    """A message as it lies in a stream."""

    @property
    def message(self) -> Any:
        """The decoded message."""

    @property
    def seq(self) -> int:
        """Its stream sequence."""

    @property
    def time(self) -> float:
        """When it was stored, in seconds since the epoch."""


class StreamSource(Protocol):
    """The part of a bus that reading the chain needs."""

    async def get(self, stream: str, seq: int) -> StoredRecord:
        """One message by sequence; LookupError when it is gone."""

    async def last(self, stream: str, subject: str) -> StoredRecord | None:
        """The last message on a subject."""

    def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[StoredRecord]:
        """All messages on the filters so far, in order."""


class BuildPlan(msgspec.Struct, frozen=True):
    """The way to build a version: apply `manifests` in order to `base`, which is None when the first is a full
    snapshot."""

    manifests: tuple[WeightManifest, ...]
    base: Path | None
    shards: frozenset[int] | None = None
    """The shards that are built; None means all."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that have to be fetched."""
        return sum(cost(manifest, self.shards) for manifest in self.manifests)


def cost(manifest: WeightManifest, shards: frozenset[int] | None) -> int:
    """Bytes to fetch for a manifest: of its chunks of these shards."""
    return sum(info.bytes for info in manifest.chunks if shards is None or info.shard in shards)


async def heads(source: StreamSource, run: str) -> AsyncIterator[tuple[int, WeightHead]]:
    """Sequence and head record of every commit of a run, oldest first."""
    async for stored in source.history(STREAM, subjects.WEIGHT_HEAD.at(run=run)):
        yield stored.seq, stored.message


async def head(source: StreamSource, run: str) -> tuple[int, WeightHead] | None:
    """The newest head record and its sequence, None before the first version."""
    stored = await source.last(STREAM, subjects.WEIGHT_HEAD.at(run=run))
    return None if stored is None else (stored.seq, stored.message)


async def manifest(source: StreamSource, run: str, seq: int, trust: Trust | None = None) -> WeightManifest:
    """The manifest at a sequence. BrokenVersion for another message, Untrusted for a bad signature, LookupError when
    it is gone.
    """
    stored = await source.get(STREAM, seq)
    try:
        message = stored.message
    except ValueError as error:
        raise BrokenVersion(f"sequence {seq} of {STREAM} cannot be read: {error}") from None
    if not isinstance(message, WeightManifest) or message.run != run:
        raise BrokenVersion(f"sequence {seq} of {STREAM} is no manifest of run {run}")
    signing.check(trust, message)
    check_manifest(message)
    return message


async def plan(
    source: StreamSource,
    commit: WeightHead,
    find: Find = lambda version, state_hash: None,
    *,
    trust: Trust | None = None,
    shards: frozenset[int] | None = None,
) -> BuildPlan:
    """The way to a committed version: the newest full snapshot and the deltas after it, or the deltas from a local file
    where these are fewer bytes. BrokenVersion when the chain is broken, Untrusted when it is not signed.

    trust: the publishers whose manifests are followed; None: all. shards: build only these; None: all.
    """
    signing.check(trust, commit)
    try:
        return await _walk(source, commit, find, trust, shards)
    except LookupError as error:
        if (beside := await _beside(source, commit, trust, shards)) is not None:
            return beside
        raise BrokenVersion(f"version {commit.version} of run {commit.run} cannot be built any more: {error}") from None


async def _beside(
    source: StreamSource, commit: WeightHead, trust: Trust | None, shards: frozenset[int] | None
) -> BuildPlan | None:
    """The full snapshot of a version that was published after its head, which then does not name it; None without
    one."""
    stored = await source.last(STREAM, subjects.WEIGHT_MANIFEST.at(run=commit.run, version=commit.version))
    full = await manifest(source, commit.run, stored.seq, trust) if stored is not None else None
    if full is None or full.base_version >= 0 or full.state_hash != commit.state_hash:
        return None
    return BuildPlan((full,), None, shards)


async def _walk(
    source: StreamSource, commit: WeightHead, find: Find, trust: Trust | None, shards: frozenset[int] | None
) -> BuildPlan:
    """Go from the version back through its deltas. LookupError when a manifest is gone before the way is complete."""
    version, state_hash, seq = commit.version, commit.state_hash, commit.manifest_seq
    way: tuple[WeightManifest, ...] = ()
    full: BuildPlan | None = None
    while True:
        if way and shards is None and (base := find(version, state_hash)):
            return BuildPlan(way, base)
        if full is None and version == commit.full_version and commit.full_seq not in (0, seq):
            with suppress(LookupError):  # collected: the deltas may lead to a local file
                beside = await manifest(source, commit.run, commit.full_seq, trust)
                if beside.state_hash == state_hash and beside.base_version < 0:
                    full = BuildPlan((beside, *way), None, shards)
        try:
            here = await manifest(source, commit.run, seq, trust)
        except LookupError:
            if full is None:
                raise
            return full
        if (here.version, here.state_hash) != (version, state_hash):
            if not way:
                raise BrokenVersion(f"the head of version {version} names a manifest of version {here.version}")
            raise BrokenVersion(f"version {way[0].version} names a base that is not version {version}")
        if way and shards is not None and (base := find(version, sharding.state_hash(here, shards))):
            return BuildPlan(way, base, shards)
        way = (here, *way)
        if here.base_version < 0:
            return full or BuildPlan(way, None, shards)
        if full is not None and BuildPlan(way, None, shards).wire_bytes >= full.wire_bytes:
            return full
        version, state_hash, seq = here.base_version, here.base_hash, here.base_seq


async def chunk(source: StreamSource, of: WeightManifest, info: ChunkInfo) -> bytes:
    """The bytes of a chunk as stored; `StagedFile.add` checks them against the manifest. LookupError when it is gone,
    DamagedChunk when the message is not a chunk."""
    stored = await source.get(STREAM, info.stream_seq)
    try:
        message = stored.message
    except ValueError as error:
        raise DamagedChunk(f"sequence {info.stream_seq} of {STREAM} cannot be read: {error}") from None
    if not isinstance(message, WeightChunk):
        raise DamagedChunk(f"sequence {info.stream_seq} of {STREAM} is no chunk of version {of.version}")
    return message.data


async def build(
    source: StreamSource,
    way: BuildPlan,
    path: Path,
    *,
    on_damage: Callable[[str], None] = lambda text: None,
    fetch: Fetch | None = None,
) -> str:
    """Fetch, apply, verify, and leave the file at `path`; returns its state hash.

    fetch: reads full snapshots that are objects; without it such a plan is a BrokenVersion. A chunk that does not match
    is fetched up to `TRIES` times, and `on_damage` gets a text each time. Decoding runs in a thread, so the event loop
    stays free. DamagedChunk or BrokenVersion when the file cannot be built; a cancellation leaves no file.
    """

    async def read(which: WeightManifest, piece: Sequence[ChunkInfo]) -> list[bytes]:
        if not which.detached:
            return [await chunk(source, which, info) for info in piece]
        if fetch is None:
            raise BrokenVersion(
                f"full snapshot {which.version} of run {which.run} is an object, and no location is known"
            )
        return await fetch(which, piece)

    steps = [(which, piece) for which in way.manifests for piece in _pieces(which, way.shards)]
    base = Snapshot(way.base) if way.base is not None else None
    with await asyncio.to_thread(StagedFile, path, way.manifests[0], base, way.shards) as staged:
        async with Ahead((partial(read, *step) for step in steps), AHEAD) as reads:
            for which in way.manifests:
                staged.begin(which)
                for piece in _pieces(which, way.shards):
                    first = reads.next()
                    for place, info in enumerate(piece):
                        for attempt in itertools.count(1):
                            try:
                                data = (await first)[place] if attempt == 1 else (await read(which, [info]))[0]
                                await asyncio.to_thread(staged.add, info, data, last=which is way.manifests[-1])
                                break
                            except DamagedChunk as error:
                                on_damage(str(error))
                                if attempt == TRIES:
                                    raise DamagedChunk(f"{error}; fetched {TRIES} times") from None
            return await asyncio.to_thread(staged.finish)


def _pieces(which: WeightManifest, shards: frozenset[int] | None) -> Iterable[Sequence[ChunkInfo]]:
    """The chunks of a version that are read at once: one record, or adjacent chunks of an object."""
    if which.detached:
        return pieces(which.chunks, shards)
    return ([info] for info in which.chunks if shards is None or info.shard in shards)


async def obtain(
    source: StreamSource,
    commit: WeightHead,
    path: Path,
    find: Find,
    *,
    on_damage: Callable[[str], None] = lambda text: None,
    trust: Trust | None = None,
    shards: frozenset[int] | None = None,
    fetch: Fetch | None = None,
) -> BuildPlan:
    """Build a committed version at `path` as `plan` says, and return the plan that worked. fetch: as in `build`.

    When the local base or a chunk is broken, or a planned record is gone, the version is built from the newest full
    snapshot before it, then from one of its own. The last error when nothing helps; BrokenVersion for a record that is
    gone.
    """

    async def tried(way: BuildPlan) -> LookupError | WeightError | None:
        try:
            await build(source, way, path, on_damage=on_damage, fetch=fetch)
        except (LookupError, WeightError) as error:
            return error
        return None

    way = await plan(source, commit, find, trust=trust, shards=shards)
    error = await tried(way)
    if error is not None and (way.base is not None or isinstance(error, LookupError)):
        on_damage(f"{error}; looking for another way to version {commit.version}")
        way = await plan(source, commit, trust=trust, shards=shards)
        error = await tried(way)
    if error is not None and (beside := await _beside(source, commit, trust, shards)) not in (None, way):
        assert beside is not None
        on_damage(f"{error}; building version {commit.version} from its own full snapshot")
        way = beside
        error = await tried(way)
    if isinstance(error, LookupError):
        raise BrokenVersion(f"version {commit.version} of run {commit.run} cannot be built any more: {error}") from None
    if error is not None:
        raise error
    return way
