"""The receiver: builds a verified file on this node for each version of a head record, and publishes WeightsStaged.

It stages the newest version first and skips versions in between, then the versions that evaluations and promotions have
pinned. The newest few stay in the store. A version is announced only when every block of it has the trainer's hash.

A head is valid only if a known publisher signed it and it follows the last valid head in the stream. A forged head, or
a genuine head that was stored again, causes an event and is ignored.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, ClassVar

from headrace.bus.errors import BusError
from headrace.bus.nats.received import Received
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.messages.base import Message
from headrace.messages.subjects import WEIGHT_HEAD
from headrace.messages.weights import WeightHead, WeightsStaged
from headrace.weights import chain, heads, shards
from headrace.weights.pins import Pins
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

AGAIN_S = 5.0
"""Seconds after which a version that could not be staged is tried again; a new head triggers this earlier."""


class WeightReceiver(Actor):
    """Head records in, WeightsStaged out."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Scan the store, read the stored heads and pins, then stage."""
        self.store = SnapshotStore(Path(self.config.run.dir) / self.run / "nodes" / self.bus.node / "weights")
        stored = await asyncio.to_thread(self.store.scan)
        if stored:
            await self.event("resumed", f"this node holds {len(stored)} versions: {sorted(stored)}")
        section = self.config.weights
        self.trust = Trust.load(self.bus.credentials, section.publishers, unsigned=section.unsigned)
        self._heads: dict[int, WeightHead] = {}
        self._origins: dict[int, tracing.Context | None] = {}
        """Version to the span that published its head."""
        self._valid_heads = heads.Heads(self.run, self.trust)
        self._pins = Pins(self.run)
        self._announced: dict[int, str] = {}
        self._failed: set[int] = set()
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
                    await self.event("stage_failed", f"version {head.version}: {error}", level="error")
                continue
            with self.waiting():
                try:
                    async with asyncio.timeout(AGAIN_S if self._failed else None):
                        await self._news.wait()
                except TimeoutError:
                    self._failed.clear()

    async def _stage(self, head: WeightHead) -> None:
        started = time.monotonic()
        wanted, state_hash = await self._wanted(head)
        path = self.store.find(head.version, state_hash)
        if path is None:
            damage: list[str] = []
            path = self.store.path(head.version)
            plan = await chain.obtain(
                self.bus, head, path, self.store.find, on_damage=damage.append, trust=self.trust, shards=wanted
            )
            self.store.put(head.version, state_hash)
            for text in damage:
                await self.event("chunk_damaged", text, level="warning", version=head.version)
            await self.metric(version=float(head.version), fetched_bytes=float(plan.wire_bytes))
        newest = max(self.config.weights.keep, self.config.curriculum.staleness + 2)
        for version in self.store.keep(newest, self._pins.versions):
            self._announced.pop(version, None)
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

    async def _wanted(self, head: WeightHead) -> tuple[frozenset[int] | None, str]:
        """The shards that this node needs (None: all), and the state hash of a file with only these shards."""
        patterns = self.config.weights.want
        if not patterns:
            return None, head.state_hash
        manifest = await chain.manifest(self.bus, self.run, head.manifest_seq, self.trust)
        needed = shards.holding(manifest.tensors, patterns)
        return needed, shards.state_hash(manifest, needed)
