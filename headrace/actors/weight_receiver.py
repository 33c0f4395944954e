"""The receiver: builds a verified file on this node for each version of a head record, and publishes WeightsStaged.

On the node of the sender a version is a link to the sender's file, so that the node has its bits once; other nodes
fetch deltas and full snapshots. It stages the newest version first and skips versions in between, then the versions
that evaluations and promotions have pinned. The newest few stay in the store. A version is announced only when every
block of it has the trainer's hash.

A head is valid only if a known publisher signed it and it follows the last valid head in the stream. A forged head, or
a genuine head that was stored again, causes an event and is ignored.

On a full disk it drops the versions that are not needed. If that does not suffice, it reports the bytes that it needs
once, and tries again when they are free or after a pause that grows.
"""

import asyncio
import errno
import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

from headrace.backoff import Backoff
from headrace.bus.errors import BusError, Unrecoverable
from headrace.bus.nats.received import Received
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.config import versions
from headrace.messages.base import Message
from headrace.messages.subjects import WEIGHT_HEAD
from headrace.messages.weights import WeightHead, WeightsStaged
from headrace.weights import chain, heads, shards, snapshot
from headrace.weights.full.location import Location, NoSnapshot
from headrace.weights.full.snapshots import FullSnapshots
from headrace.weights.pins import Pins
from headrace.weights.receiving.staging import BrokenVersion, DamagedChunk
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

AGAIN_S = 5.0
"""Seconds after which a version that could not be staged is tried again; a new head triggers this earlier."""
FULL_AGAIN_S = 300.0
"""Largest pause in seconds between two attempts on a disk that seems full."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WeightReceiver(Actor):
    """Head records in, WeightsStaged out."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Scan the store, read the stored heads and pins, then stage."""
        folder = versions.folder(self.config, self.run)
        self.store = SnapshotStore(folder / "nodes" / self.bus.node / "weights")
        self._sent = SnapshotStore(SnapshotStore.sent(folder, self.bus.node))
        """Of a sender on this node."""
        stored = await asyncio.to_thread(self.store.scan)
        if stored:
            await self.event("resumed", f"this node holds {len(stored)} versions: {sorted(stored)}")
        section = self.config.weights
        self.trust = Trust.load(self.bus.credentials, section.publishers, unsigned=section.unsigned)
        self._heads: dict[int, WeightHead] = {}
        self._origins: dict[int, tracing.TraceContext | None] = {}
        """Version to the span that published its head."""
        self._valid_heads = heads.Heads(self.run, self.trust)
        self._pins = Pins(self.run)
        self._announced: dict[int, str] = {}
        self._failed: set[int] = set()
        self._told: dict[int, tuple[str, int]] = {}
        """Version to the text of its latest failure and how often that came in a row."""
        self._full = Backoff(AGAIN_S, FULL_AGAIN_S)
        self._lacking = 0
        """Bytes that must be free before the next attempt on a full disk, or `_full_until` has come; 0: not full."""
        self._full_until = 0.0
        self._warned = False
        await self._open_location()
        self._news = asyncio.Event()
        where, pins = WEIGHT_HEAD.at(run=self.run), self._pins.filters
        after = {"HR_WEIGHTS": 0, "HR_EVENT": 0}
        async for received in self.bus.history("HR_WEIGHTS", where):
            await self._hear_head(received)
            after["HR_WEIGHTS"] = received.seq
        async for received in self.bus.history("HR_EVENT", *pins):
            self._hear_pin(received.message)
            after["HR_EVENT"] = received.seq
        self.spawn(self._follow_heads(where, after["HR_WEIGHTS"]), "heads")
        self.spawn(self._follow_pins(pins, after["HR_EVENT"]), "pins")
        self.spawn(self._work(), "staging")

    async def _open_location(self) -> None:
        """Find where full snapshots are. Unrecoverable."""
        section = self.config.weights
        try:
            location = Location.of_run(section, Path(self.config.run.dir) / self.run)
            await asyncio.to_thread(location.open)
        except WeightError as error:
            raise Unrecoverable(f"[weights] full_snapshots_url: {error}") from error
        copies = Path(section.region_dir) / self.run if section.region_dir else None
        self._snapshots = FullSnapshots(location, copies, self._tell_copy)

    async def _tell_copy(self, text: str) -> None:
        await self.event("copy_failed", text, level="warning")

    async def _follow_heads(self, where: str, after: int) -> None:
        async for received in self.bus.follow("HR_WEIGHTS", where, start=after + 1):
            await self._hear_head(received)

    async def _follow_pins(self, filters: list[str], after: int) -> None:
        async for received in self.bus.follow("HR_EVENT", *filters, start=after + 1):
            self._hear_pin(received.message)

    async def _hear_head(self, received: Received[Any]) -> None:
        try:
            head = self._valid_heads.take(received)
        except WeightError as error:
            await self.event("head_refused", str(error), level="error", sequence=received.seq)
            return
        self._heads[head.version] = head
        self._origins[head.version] = tracing.exported(received.headers)
        self._failed.discard(head.version)
        self._news.set()

    def _hear_pin(self, message: Message) -> None:
        self._pins.take(message)
        self._news.set()

    def _next(self) -> WeightHead | None:
        """The next version to stage: the newest, then the pinned ones; None when all are staged or have failed."""
        if self._lacking and time.monotonic() < self._full_until and self._free() < self._lacking:
            return None
        wanted = [self._valid_heads.newest, *(self._heads.get(version) for version in self._pins.versions)]
        for head in wanted:
            if head is None or head.version in self._failed:
                continue
            if self._announced.get(head.version) != head.state_hash or not self.store.path(head.version).exists():
                return head
        return None

    async def _work(self) -> None:
        while True:
            self._news.clear()
            head = self._next()
            if head is not None:
                attributes: dict[str, str | int] = {
                    "hr.run": self.run,
                    "hr.version": head.version,
                    "hr.region": self.config.weights.region,
                    "hr.node": self.bus.node,
                }
                origin = self._origins.get(head.version)
                try:
                    with tracing.span("stage version", parent=origin, root=origin is None, attributes=attributes):
                        await self._stage(head)
                except (WeightError, BusError, OSError) as error:
                    self._failed.add(head.version)
                    await self._failure(head, error)
                else:
                    self._told.pop(head.version, None)
                    self._lacking = 0
                    self._full.reset()
                continue
            with self.waiting():
                try:
                    async with asyncio.timeout(AGAIN_S if self._failed or self._lacking else None):
                        await self._news.wait()
                except TimeoutError:
                    self._failed.clear()

    async def _failure(self, head: WeightHead, error: WeightError | BusError | OSError) -> None:
        """Report a version that could not be staged; the same failure again only each time its count has doubled."""
        if isinstance(error, OSError) and error.errno in _FULL:
            self._full_until = time.monotonic() + self._full.next()
            if not self._lacking:
                section = self.config.weights
                need, held = await self._need(head), self.store.versions()
                self._lacking = need
                await self.event(
                    "disk_full",
                    f"version {head.version} needs {need} bytes in {self.store.folder}/ and {self._free()} are free; "
                    f"the versions {held} stay, because they are newest or pinned: free some space, or lower [weights] "
                    f"keep ({section.keep}); until then this node stages nothing ({error.strerror})",
                    level="error",
                    needed_bytes=need,
                    free_bytes=self._free(),
                )
            return
        text, count = f"version {head.version}: {error}", 1
        if self._told.get(head.version, ("", 0))[0] == text:
            count += self._told[head.version][1]
        self._told[head.version] = text, count
        if count & (count - 1) == 0:
            kind = "no_full_snapshot" if isinstance(error, NoSnapshot) else "stage_failed"
            asks = chain.ASKS if isinstance(error, BrokenVersion | DamagedChunk) else ""
            await self.event(kind, text, level="error", times=count, version=head.version, asks=asks)

    async def _need(self, head: WeightHead) -> int:
        """Bytes of a version's file, about."""
        try:
            return (await chain.manifest(self.bus, self.run, head.manifest_seq, self.trust)).raw_bytes
        except (WeightError, LookupError):
            return 1

    def _free(self) -> int:
        return shutil.disk_usage(self.store.folder).free

    def _drop(self, newest: int) -> list[int]:
        """Drop all versions but the `newest` highest and the pinned ones."""
        gone = self.store.keep(newest, self._pins.versions)
        for version in gone:
            self._announced.pop(version, None)
        return gone

    async def _warn_of_small_disk(self, head: WeightHead) -> None:
        """Report once, with the first version, when the disk does not hold the versions that this node keeps."""
        count, size = versions.versions_kept(self.config), await self._need(head)
        held = sum(self.store.path(version).stat().st_size for version in self.store.versions())
        if count * size > self._free() + held:
            await self.event(
                "disk_small",
                f"this node keeps {count} versions of {size} bytes in {self.store.folder}/, {self._free()} bytes are "
                f"free and it has {held} there: free some space, or lower [weights] keep ({self.config.weights.keep})",
                level="warning",
                needed_bytes=count * size,
            )

    async def _stage(self, head: WeightHead) -> None:
        started = time.monotonic()
        if not self._warned:
            self._warned = True
            await self._warn_of_small_disk(head)
        wanted, state_hash = await self._wanted(head)
        path = self.store.find(head.version, state_hash)
        if path is None:
            path = self.store.path(head.version)
            self._drop(self.config.weights.keep)
            try:
                await self._build(head, path, wanted, state_hash)
            except OSError as error:
                # The version itself takes the place of the oldest one that is kept.
                if error.errno not in _FULL or not self._drop(self.config.weights.keep - 1):
                    raise
                await self._build(head, path, wanted, state_hash)
        self._drop(self.config.weights.keep)
        staged = WeightsStaged(
            run=self.run,
            node=self.bus.node,
            region=self.config.weights.region,
            version=head.version,
            path=str(path.resolve()),
            state_hash=state_hash,
            stage_s=time.monotonic() - started,
        )
        await self.publish_event(staged)
        self._announced[head.version] = head.state_hash
        self.status = f"version {head.version} staged"

    def _linked(self, head: WeightHead) -> bool:
        """Take the file that a sender on this node has published; False without one of this state."""
        try:
            path = self.store.take(self._sent.path(head.version), head.version)
            if snapshot.file_hash(path) == head.state_hash:
                return True
        except (FileNotFoundError, WeightError):
            pass
        self.store.drop([head.version])
        return False

    async def _build(self, head: WeightHead, path: Path, wanted: frozenset[int] | None, state_hash: str) -> None:
        if wanted is None and await asyncio.to_thread(self._linked, head):
            self.store.put(head.version, state_hash)
            await self.metric(version=float(head.version), fetched_bytes=0.0)
            return
        damage: list[str] = []
        plan = await chain.obtain(
            self.bus,
            head,
            path,
            self.store.find,
            on_damage=damage.append,
            trust=self.trust,
            shards=wanted,
            fetch=self._snapshots.fetch,
        )
        self.store.put(head.version, state_hash)
        for text in damage:
            await self.event("chunk_damaged", text, level="warning", version=head.version)
        await self.metric(version=float(head.version), fetched_bytes=float(plan.wire_bytes))

    async def _wanted(self, head: WeightHead) -> tuple[frozenset[int] | None, str]:
        """The shards that this node needs (None: all), and the state hash of a file with only these shards."""
        patterns = self.config.weights.want
        if not patterns:
            return None, head.state_hash
        manifest = await chain.manifest(self.bus, self.run, head.manifest_seq, self.trust)
        needed = shards.holding(manifest.tensors, patterns)
        return needed, shards.state_hash(manifest, needed)
