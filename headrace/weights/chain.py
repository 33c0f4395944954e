"""Walking the chain of versions in the stream, and building a version from it: what receivers, a sender that lost its
base, auditors and late joiners have in common.

The idea: a head record names its manifest by stream sequence, a manifest names its base's, so the way back needs no
search and never meets a manifest that no head committed. Versions are places, deltas, folds and anchors are roads
whose length is their bytes: the way to a version is the shortest one from a file that is here, or from nothing
(Dijkstra, backwards, reading only the manifests that it passes). Then the deltas are applied forward into one shadow.

The bus is handed in (`Source`): this room only asks it for messages by sequence or subject. With a `Trust`, nothing is
followed that a known publisher did not sign.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.messages import subjects
from headrace.messages.weights import ChunkInfo, WeightChunk, WeightFold, WeightHead, WeightManifest
from headrace.weights import shards as sharding
from headrace.weights import signing
from headrace.weights.shadow import Damaged, Refused, Shadow, check_manifest
from headrace.weights.signing import Trust, Untrusted
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError

STREAM = "HR_WEIGHTS"
AHEAD = 8
"""Chunks asked for before they are needed."""
TRIES = 3
"""How often a chunk that does not match is fetched."""

Find = Callable[[int, str], Path | None]
"""(version, state hash) to the file of exactly that state, or None."""


class Stored(Protocol):
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


class Source(Protocol):
    """What this room needs of a bus."""

    async def get(self, stream: str, seq: int) -> Stored:
        """One message by sequence; LookupError when it is gone."""

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message on a subject."""

    def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Stored]:
        """All messages on the filters so far, in order."""


class Plan(msgspec.Struct, frozen=True):
    """How a version is built: apply `manifests` in order to `base`; None when the first is an anchor."""

    manifests: tuple[WeightManifest, ...]
    base: Path | None
    shards: frozenset[int] | None = None
    """The shards that are built; None means all."""
    folded: int = 0
    """How many of the manifests are folds."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that have to be fetched."""
        return sum(cost(manifest, self.shards) for manifest in self.manifests)

    def chunks(self) -> Iterator[tuple[WeightManifest, ChunkInfo]]:
        """What has to be fetched, in order."""
        for manifest in self.manifests:
            for info in manifest.chunks:
                if self.shards is None or info.shard in self.shards:
                    yield manifest, info


def cost(manifest: WeightManifest, shards: frozenset[int] | None) -> int:
    """Bytes of a manifest's chunks of these shards."""
    if shards is None:
        return manifest.wire_bytes
    return sum(info.bytes for info in manifest.chunks if info.shard in shards)


async def heads(source: Source, run: str) -> AsyncIterator[tuple[int, WeightHead]]:
    """Sequence and head record of every commit of a run, oldest first."""
    async for stored in source.history(STREAM, subjects.WEIGHT_HEAD.at(run=run)):
        yield stored.seq, stored.message


async def head(source: Source, run: str) -> tuple[int, WeightHead] | None:
    """The newest head record and its sequence, None before the first version."""
    stored = await source.last(STREAM, subjects.WEIGHT_HEAD.at(run=run))
    return None if stored is None else (stored.seq, stored.message)


async def manifest(source: Source, run: str, seq: int, trust: Trust | None = None) -> WeightManifest:
    """The manifest at a sequence. Refused when something else lies there, Untrusted when it is not signed as it should
    be, LookupError when it is gone.
    """
    stored = await source.get(STREAM, seq)
    try:
        found = stored.message
    except ValueError as error:
        raise Refused(f"sequence {seq} of {STREAM} cannot be read: {error}") from None
    if not isinstance(found, WeightManifest) or found.run != run:
        raise Refused(f"sequence {seq} of {STREAM} is no manifest of run {run}")
    signing.check(trust, found)
    check_manifest(found)
    return found


async def folds(source: Source, run: str, trust: Trust | None = None) -> AsyncIterator[WeightFold]:
    """The folds of a run, oldest first, without those that cannot be trusted."""
    async for stored in source.history(STREAM, subjects.WEIGHT_FOLD.at(run=run)):
        try:
            found = stored.message
            if isinstance(found, WeightFold) and found.run == run:
                signing.check(trust, found)
                yield found
        except (Untrusted, ValueError):
            continue


class _Place(NamedTuple):
    """A version on the way back: how far it is, and the manifests that lead from it to the wanted one."""

    far: int
    order: int
    version: int
    state_hash: str
    seq: int
    """Stream sequence of its manifest; 0 when the way is found: from nothing."""
    way: tuple[WeightManifest, ...]
    folded: int


async def plan(
    source: Source,
    commit: WeightHead,
    find: Find = lambda version, state_hash: None,
    *,
    trust: Trust | None = None,
    shards: frozenset[int] | None = None,
    folded: bool = True,
) -> Plan:
    """The cheapest way to a committed version. Refused when the chain is broken, Untrusted when it is not signed.

    trust: whose manifests are followed; None follows all. shards: build these alone. folded: take short cuts.
    """
    signing.check(trust, commit)
    try:
        return await _search(source, commit, find, trust, shards, folded, deep=False)
    except LookupError:
        # What it was based on is collected. An anchor laid beside it later, which its own head does not name, will do.
        try:
            return await _search(source, commit, find, trust, shards, folded, deep=True)
        except LookupError as error:
            raise Refused(f"version {commit.version} of run {commit.run} cannot be built any more: {error}") from None


async def _search(
    source: Source,
    commit: WeightHead,
    find: Find,
    trust: Trust | None,
    shards: frozenset[int] | None,
    folded: bool,
    *,
    deep: bool,
) -> Plan:
    short: dict[tuple[int, str], list[WeightFold]] = {}
    if folded and await source.last(STREAM, subjects.WEIGHT_FOLD.at(run=commit.run)) is not None:
        async for fold in folds(source, commit.run, trust):
            short.setdefault((fold.version, fold.state_hash), []).append(fold)
    count = itertools.count()
    heap = [_Place(0, next(count), commit.version, commit.state_hash, commit.manifest_seq, (), 0)]
    seen: set[tuple[int, str]] = set()
    gone: LookupError | None = None

    def go(at: _Place, through: WeightManifest, *, fold: bool = False) -> None:
        far, way = at.far + cost(through, shards), (through, *at.way)
        seq = through.base_seq if through.base_version >= 0 else 0
        place = (through.base_version, through.base_hash, seq, way, at.folded + fold)
        heapq.heappush(heap, _Place(far, next(count), *place))

    while heap:
        at = heapq.heappop(heap)
        if at.way and not at.seq:
            return Plan(at.way, None, shards, at.folded)
        if (at.version, at.state_hash) in seen:
            continue
        seen.add((at.version, at.state_hash))
        base = find(at.version, at.state_hash) if at.way and shards is None else None
        if base is not None:
            return Plan(at.way, base, shards, at.folded)
        try:
            found = await manifest(source, commit.run, at.seq, trust)
        except LookupError as error:
            # Collected: only an anchor or a fold that ends here may still lead on.
            gone = gone or error
        else:
            _agree(at, found)
            if at.way and shards is not None:
                base = find(at.version, sharding.state_hash(found, shards))
                if base is not None:
                    return Plan(at.way, base, shards, at.folded)
            go(at, found)
        if at.version == commit.anchor_version and commit.anchor_seq not in (0, at.seq):
            try:
                anchor = await manifest(source, commit.run, commit.anchor_seq, trust)
                if anchor.state_hash == at.state_hash and anchor.base_version < 0:
                    go(at, anchor)
            except LookupError as error:
                gone = gone or error
        if deep:
            beside = await source.last(STREAM, subjects.WEIGHT_MANIFEST.at(run=commit.run, version=at.version))
            later = await manifest(source, commit.run, beside.seq, trust) if beside is not None else None
            if later is not None and later.state_hash == at.state_hash and later.base_version < 0:
                go(at, later)
        for fold in short.get((at.version, at.state_hash), ()):
            try:
                straight = await manifest(source, commit.run, fold.manifest_seq, trust)
            except (LookupError, WeightError):
                continue
            if (straight.version, straight.state_hash) == (at.version, at.state_hash) and straight.base_version >= 0:
                go(at, straight, fold=True)
    raise gone or LookupError("no way leads there")


def _agree(at: _Place, found: WeightManifest) -> None:
    if (found.version, found.state_hash) == (at.version, at.state_hash):
        return
    if not at.way:
        raise Refused(f"the head of version {at.version} names a manifest of version {found.version}")
    raise Refused(f"version {at.way[0].version} names a base that is not version {at.version}")


async def chunk(source: Source, of: WeightManifest, info: ChunkInfo) -> bytes:
    """The bytes of a chunk as they lie in the stream; whether they are the right ones is `Shadow.add`'s to say."""
    stored = await source.get(STREAM, info.stream_seq)
    try:
        found = stored.message
    except ValueError as error:
        raise Damaged(f"sequence {info.stream_seq} of {STREAM} cannot be read: {error}") from None
    if not isinstance(found, WeightChunk):
        raise Damaged(f"sequence {info.stream_seq} of {STREAM} is no chunk of version {of.version}")
    return found.data


async def build(source: Source, way: Plan, path: Path, *, on_damage: Callable[[str], None] = lambda text: None) -> str:
    """Fetch, apply, verify, and leave the file at `path`; returns its state hash.

    A chunk that does not match is fetched again, `TRIES` times in all, and `on_damage` is told each time. Decoding runs
    in a thread: the event loop stays free. Damaged or Refused say why there is no file; a cancellation leaves none.
    """
    last = way.manifests[-1]
    upcoming = way.chunks()
    fetching: deque[asyncio.Task[bytes]] = deque()

    def ask(count: int) -> None:
        for which, info in itertools.islice(upcoming, count):
            fetching.append(asyncio.create_task(chunk(source, which, info)))

    base = Snapshot(way.base) if way.base is not None else None
    with await asyncio.to_thread(Shadow, path, way.manifests[0], base, way.shards) as shadow:
        try:
            ask(AHEAD)
            for which in way.manifests:
                shadow.begin(which)
                for info in filter(shadow.wants, which.chunks):
                    for attempt in itertools.count(1):
                        try:
                            data = await (chunk(source, which, info) if attempt > 1 else fetching.popleft())
                            await asyncio.to_thread(shadow.add, info, data, last=which is last)
                            break
                        except Damaged as error:
                            on_damage(str(error))
                            if attempt == TRIES:
                                raise Damaged(f"{error}; fetched {TRIES} times") from None
                    ask(1)
            return await asyncio.to_thread(shadow.finish)
        finally:
            for task in fetching:
                task.cancel()
            await asyncio.gather(*fetching, return_exceptions=True)


async def obtain(
    source: Source,
    commit: WeightHead,
    path: Path,
    find: Find,
    *,
    on_damage: Callable[[str], None] = lambda text: None,
    trust: Trust | None = None,
    shards: frozenset[int] | None = None,
) -> Plan:
    """Build a committed version at `path` the cheapest way; when the local base or a fold turns out broken, or what was
    planned is collected meanwhile, from the anchor. Refused when nothing is left to build it from.

    Returns the plan that worked.
    """
    way = await plan(source, commit, find, trust=trust, shards=shards)
    try:
        await build(source, way, path, on_damage=on_damage)
        return way
    except LookupError as error:
        on_damage(f"{error}; looking for another way to version {commit.version}")
    except WeightError as error:
        if way.base is None and not way.folded:
            raise
        on_damage(f"{error}; building version {commit.version} from its anchor instead")
    way = await plan(source, commit, trust=trust, shards=shards, folded=False)
    try:
        await build(source, way, path, on_damage=on_damage)
    except LookupError as error:
        raise Refused(
            f"version {commit.version} of run {commit.run} was collected while it was fetched: {error}"
        ) from None
    return way
