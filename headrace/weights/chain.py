"""Walking the chain of versions in the stream, and building a version from it: what receivers, a sender that lost its
base, auditors and late joiners have in common.

The idea: a head record names its manifest by stream sequence, a manifest names its base's, so the way back needs no
search and never meets a manifest that no head committed. Going back ends at a file that is here, or at the newest
anchor, whichever costs fewer bytes; then the deltas are applied forward into one shadow.

The bus is handed in (`Source`): this room only asks it for messages by sequence or subject.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.messages import subjects
from headrace.messages.weights import ChunkInfo, WeightChunk, WeightHead, WeightManifest
from headrace.weights.shadow import Damaged, Refused, Shadow, check_manifest
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
        """One message by sequence; raises when it is gone."""

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message on a subject."""

    def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Stored]:
        """All messages on the filters so far, in order."""


class Plan(msgspec.Struct, frozen=True):
    """How a version is built: apply `manifests` in order to `base`; None when the first is an anchor."""

    manifests: tuple[WeightManifest, ...]
    base: Path | None

    @property
    def wire_bytes(self) -> int:
        """Bytes that have to be fetched."""
        return sum(manifest.wire_bytes for manifest in self.manifests)


async def heads(source: Source, run: str) -> AsyncIterator[tuple[int, WeightHead]]:
    """Sequence and head record of every commit of a run, oldest first."""
    async for stored in source.history(STREAM, subjects.WEIGHT_HEAD.at(run=run)):
        yield stored.seq, stored.message


async def head(source: Source, run: str) -> tuple[int, WeightHead] | None:
    """The newest head record and its sequence, None before the first version."""
    stored = await source.last(STREAM, subjects.WEIGHT_HEAD.at(run=run))
    return None if stored is None else (stored.seq, stored.message)


async def manifest(source: Source, run: str, seq: int) -> WeightManifest:
    """The manifest at a sequence. Refused when something else lies there."""
    found = (await source.get(STREAM, seq)).message
    if not isinstance(found, WeightManifest) or found.run != run:
        raise Refused(f"sequence {seq} of {STREAM} is no manifest of run {run}")
    check_manifest(found)
    return found


async def plan(source: Source, commit: WeightHead, find: Find = lambda version, state_hash: None) -> Plan:
    """The cheapest way to a committed version. Refused when the chain is broken."""
    current = await manifest(source, commit.run, commit.manifest_seq)
    if current.version != commit.version or current.state_hash != commit.state_hash:
        raise Refused(f"the head of version {commit.version} names a manifest of version {current.version}")
    deltas: list[WeightManifest] = []
    anchored: Plan | None = None
    while True:
        if current.base_version < 0:
            return _cheaper(Plan((current, *reversed(deltas)), None), anchored)
        if anchored is None and current.version == commit.anchor_version and commit.anchor_seq:
            anchor = await manifest(source, commit.run, commit.anchor_seq)
            if anchor.state_hash == current.state_hash and anchor.base_version < 0:
                anchored = Plan((anchor, *reversed(deltas)), None)
        deltas.append(current)
        base = find(current.base_version, current.base_hash)
        if base is not None:
            return _cheaper(Plan(tuple(reversed(deltas)), base), anchored)
        if anchored is not None and sum(delta.wire_bytes for delta in deltas) >= anchored.wire_bytes:
            return anchored
        previous = await manifest(source, commit.run, current.base_seq)
        if previous.state_hash != current.base_hash or previous.version != current.base_version:
            raise Refused(f"version {current.version} names a base that is not version {current.base_version}")
        current = previous


def _cheaper(found: Plan, anchored: Plan | None) -> Plan:
    return anchored if anchored is not None and anchored.wire_bytes < found.wire_bytes else found


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
    wanted = [(which, info) for which in way.manifests for info in which.chunks]
    last = way.manifests[-1]
    upcoming = iter(wanted)
    fetching: deque[asyncio.Task[bytes]] = deque()

    def ask(count: int) -> None:
        for which, info in itertools.islice(upcoming, count):
            fetching.append(asyncio.create_task(chunk(source, which, info)))

    base = Snapshot(way.base) if way.base is not None else None
    with await asyncio.to_thread(Shadow, path, way.manifests[0], base) as shadow:
        try:
            ask(AHEAD)
            for which in way.manifests:
                shadow.begin(which)
                for info in which.chunks:
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
    source: Source, commit: WeightHead, path: Path, find: Find, *, on_damage: Callable[[str], None] = lambda text: None
) -> Plan:
    """Build a committed version at `path` the cheapest way; when the local base turns out broken, from the anchor.

    Returns the plan that worked.
    """
    way = await plan(source, commit, find)
    try:
        await build(source, way, path, on_damage=on_damage)
        return way
    except WeightError as error:
        if way.base is None:
            raise
        on_damage(f"{error}; building version {commit.version} from its anchor instead")
    way = await plan(source, commit)
    await build(source, way, path, on_damage=on_damage)
    return way
