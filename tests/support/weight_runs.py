"""A run for tests of the weight actors: a trainer that writes and announces files, and waiting for what follows."""

import asyncio
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec

from headrace.actors.weight_sender import WeightSender
from headrace.bus.connection import Bus
from headrace.bus.runtime.actor import Actor
from headrace.config import Config, Weights, versions
from headrace.config import Run as RunSection
from headrace.messages.base import Message
from headrace.messages.subjects import EVENT, WEIGHT_HEAD
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightHead, WeightsStaged
from headrace.weights import tensor_state
from headrace.weights.chain import Fetch
from headrace.weights.full.location import Location
from headrace.weights.full.snapshots import FullSnapshots
from tests.conftest import Connect
from tests.support.weights import model, step

A = TypeVar("A", bound=Actor)


class WeightRun:
    """The folder of a run, a trainer's connection, and the actors that the test started."""

    def __init__(self, connect: Connect, folder: Path, **weights: Any):
        self.connect, self.folder = connect, folder
        self.id = f"r{token_hex(4)}"
        self.config = Config(run=RunSection(dir=str(folder)), weights=Weights(**weights))
        self.tensors = model(wide=20_000)
        self.hashes: dict[int, str] = {}
        self.actors: list[Actor] = []

    async def open(self) -> "WeightRun":
        """Connect as the trainer, and as someone who only looks."""
        self.trainer: Bus = await self.connect("trainer")
        self.bus: Bus = await self.connect("operator")
        return self

    def path(self, version: int) -> Path:
        """The trainer's file of a version."""
        return versions.folder(self.config, self.id) / "snapshots" / f"{version}.safetensors"

    @property
    def fetch(self) -> Fetch:
        """Reads the run's full snapshots."""

        async def tell(text: str) -> None:
            raise AssertionError(text)

        return FullSnapshots(Location.of_run(self.config.weights, self.folder / self.id), None, tell).fetch

    async def actor(self, cls: type[A], *, node: str = "", bus: Bus | None = None) -> A:
        """An actor on a node, started. node: "n1", or "n0" for a sender, whose versions other nodes fetch."""
        node = node or ("n0" if cls is WeightSender else "n1")
        bus = bus or await self.connect("weight_sync", node=node)
        actor = cls(self.config, bus, self.id, f"{cls.name()}-{token_hex(2)}")
        self.actors.append(actor)
        await actor.start()
        return actor

    def write(self, version: int, *, density: float = 0.01, same: bool = False) -> SnapshotReady:
        """The trainer's file of a version, not yet announced."""
        if version and not same:
            self.tensors = step(self.tensors, version, density)
        path = self.path(version)
        self.hashes[version] = tensor_state.write(path, self.tensors)
        return SnapshotReady(
            run=self.id, version=version, path=str(path), state_hash=self.hashes[version], bytes=path.stat().st_size
        )

    async def announce(self, ready: Message) -> int:
        """Publish as the trainer."""
        return await self.trainer.publish(EVENT.at(run=self.id, actor="trainer", type=ready.type_name), ready)

    async def train(self, version: int, **options: Any) -> None:
        """Write and announce."""
        await self.announce(self.write(version, **options))

    async def head(self, version: int) -> WeightHead:
        """Wait for the head record of a version."""
        async for received in self.bus.follow("HR_WEIGHTS", WEIGHT_HEAD.at(run=self.id)):
            if received.message.version == version:
                return msgspec.convert(received.message, WeightHead)
        raise AssertionError("the stream ended")

    async def heads(self) -> list[WeightHead]:
        """All head records so far."""
        return [received.message async for received in self.bus.history("HR_WEIGHTS", WEIGHT_HEAD.at(run=self.id))]

    async def staged(self, version: int, *, node: str = "n1", start: int = 1) -> WeightsStaged:
        """Wait until a node has staged a version."""
        where = EVENT.where(run=self.id, type="weights_staged")
        async for received in self.bus.follow("HR_EVENT", where, start=start):
            message = received.message
            if isinstance(message, WeightsStaged) and (message.version, message.node) == (version, node):
                return message
        raise AssertionError("the stream ended")

    async def event(self, kind: str, part: str = "") -> str:
        """Wait for an event of that kind with `part` in its text; the text."""
        async for received in self.bus.follow("HR_EVENT", EVENT.where(run=self.id, type="event")):
            if received.message.kind == kind and part in received.message.text:
                return str(received.message.text)
        raise AssertionError("the stream ended")

    async def close(self) -> None:
        """End the actors; one that failed by surprise fails the test."""
        for actor in self.actors:
            await actor.shut(2.0)


async def within(seconds: float, what: Any) -> Any:
    """Wait with a time limit: a hang becomes a failure with this text."""
    async with asyncio.timeout(seconds):
        return await what
