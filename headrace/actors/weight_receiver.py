"""The receiver: from head records to verified files on this node, one per version, announced with WeightsStaged.

It stages the newest head first and skips what lies between, then whatever versions evaluations and promotions have
pinned; the last few stay on the shelf. A version is announced only when every slab of it has the trainer's hash.
"""

import asyncio
import time
from pathlib import Path
from typing import ClassVar

from headrace.bus.actor import Actor
from headrace.bus.errors import BusError
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product import Promotion
from headrace.messages.subjects import EVENT, WEIGHT_HEAD
from headrace.messages.weights import WeightHead, WeightsStaged
from headrace.weights import chain
from headrace.weights.shelf import Shelf
from headrace.weights.state import WeightError

AGAIN_S = 5.0
"""After this time a version that could not be staged is tried again, if no head came before."""


class WeightReceiver(Actor):
    """Head records in, WeightsStaged out."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Take stock of the shelf, read heads and pins so far, then stage."""
        self.shelf = Shelf(Path(self.config.run.dir) / self.run / "nodes" / self.bus.node / "weights")
        held = await asyncio.to_thread(self.shelf.scan)
        if held:
            await self.event("resumed", f"{len(held)} versions lie on this node: {sorted(held)}")
        self._heads: dict[int, WeightHead] = {}
        self._newest: WeightHead | None = None
        self._pins: dict[str, int] = {}
        """Who needs a version: an evaluation's id, or "promotion"."""
        self._announced: dict[int, str] = {}
        self._failed: set[int] = set()
        self._news = asyncio.Event()
        heads, pins = WEIGHT_HEAD.at(run=self.run), self._pin_filters()
        after = {"HR_WEIGHTS": 0, "HR_EVENT": 0}
        async for received in self.bus.history("HR_WEIGHTS", heads):
            self._hear(received.message)
            after["HR_WEIGHTS"] = received.seq
        async for received in self.bus.history("HR_EVENT", *pins):
            self._hear(received.message)
            after["HR_EVENT"] = received.seq
        self.spawn(self._follow("HR_WEIGHTS", [heads], after["HR_WEIGHTS"]), "heads")
        self.spawn(self._follow("HR_EVENT", pins, after["HR_EVENT"]), "pins")
        self.spawn(self._work(), "staging")

    def _pin_filters(self) -> list[str]:
        kinds = (EvalRequest.type_name, EvalResult.type_name, Promotion.type_name)
        return [EVENT.where(run=self.run, type=kind) for kind in kinds]

    async def _follow(self, stream: str, filters: list[str], after: int) -> None:
        async for received in self.bus.follow(stream, *filters, start=after + 1):
            self._hear(received.message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, WeightHead):
            self._heads[message.version] = self._newest = message
            self._failed.discard(message.version)
        elif isinstance(message, EvalRequest) and message.policy.kind == "pinned":
            self._pins[message.id] = message.policy.version
        elif isinstance(message, EvalResult):
            self._pins.pop(message.id, None)
        elif isinstance(message, Promotion):
            self._pins["promotion"] = message.version
        self._news.set()

    def _next(self) -> WeightHead | None:
        """The next version to stage: the newest, else one that is pinned."""
        wanted = [self._newest, *(self._heads.get(version) for version in self._pins.values())]
        for head in wanted:
            if head is None or head.version in self._failed:
                continue
            here = self.shelf.find(head.version, head.state_hash) is not None
            if not here or self._announced.get(head.version) != head.state_hash:
                return head
        return None

    async def _work(self) -> None:
        while True:
            self._news.clear()
            head = self._next()
            if head is not None:
                try:
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
        path = self.shelf.find(head.version, head.state_hash)
        if path is None:
            damage: list[str] = []
            path = self.shelf.path(head.version)
            plan = await chain.obtain(self.bus, head, path, self.shelf.find, on_damage=damage.append)
            self.shelf.put(head.version, head.state_hash)
            for text in damage:
                await self.event("chunk_damaged", text, level="warning", version=head.version)
            await self.metric(version=float(head.version), fetched_bytes=float(plan.wire_bytes))
        newest = max(self.config.weights.keep, self.config.curriculum.staleness + 2)
        for version in self.shelf.keep(newest, self._pins.values()):
            self._announced.pop(version, None)
        staged = WeightsStaged(
            run=self.run,
            node=self.bus.node,
            region=self.config.weights.region,
            version=head.version,
            path=str(path.resolve()),
            state_hash=head.state_hash,
            stage_s=time.monotonic() - started,
        )
        await self.publish_event(staged)
        self._announced[head.version] = head.state_hash
        self.status = f"version {head.version} staged"
