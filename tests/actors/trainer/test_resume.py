"""A trainer resumes from the newest checkpoint that is whole and that the streams support."""

import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.trainer import resume
from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.resume import REASON
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import Unrecoverable
from headrace.bus.nats.streams import declare
from headrace.config import Config
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT, STEP
from headrace.messages.training import StepDone, StepFailed
from headrace.training.checkpoint import Damaged
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.recorded_run import GROUP, PER_STEP, RunFeeder, config, kill, new_run

pytestmark = pytest.mark.anyio
STEPS = 3


def often(folder: Path) -> Config:
    """A checkpoint after every step."""
    return config(folder, trainer={"checkpoint_every": 1})


async def trained(connect: Connect, folder: Path) -> RunFeeder:
    """A run of `STEPS` steps, whose trainer was killed."""
    feeder = RunFeeder(await connect(), new_run(), folder)
    trainer = Trainer(often(folder), await connect("trainer"), feeder.run, "t-1")
    await trainer.start()
    for number in range(STEPS):
        await feeder.batch(number)
    await feeder.version(STEPS)
    await told(feeder, "checkpoint", STEPS)
    kill(trainer)
    return feeder


async def told(feeder: RunFeeder, kind: str, version: int = -1) -> Event:
    """The first event of a kind, and of a version if one is named."""
    async for received in feeder.bus.follow("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer", type="event")):
        event = received.message
        if isinstance(event, Event) and event.kind == kind and version in (-1, event.data.get("version")):
            return event
    raise AssertionError


async def failure(connect: Connect, feeder: RunFeeder, folder: Path) -> BaseException:
    """The error that ends a trainer's start."""
    trainer = Trainer(often(folder), await connect("trainer"), feeder.run, "t-2")
    await trainer.start()
    try:
        error: BaseException = await trainer.failed
        return error
    finally:
        await trainer.shut(1.0)


class OlderBroker:
    """A run of `STEPS` steps, and a broker that has lost the newest of them: its store is a copy from before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> "OlderBroker":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def serve(self) -> None:
        """Start the broker, or start it again."""
        await self.stack.aclose()
        self.server = await self.stack.enter_async_context(Server(self.folder / "broker"))
        self.admin = await self.stack.enter_async_context(await as_writers(self.server.url, self.server.credentials))

    async def trainer(self, id: str) -> Trainer:
        """A trainer that is started."""
        bus = await Bus.connect(self.server.url, role="trainer", credentials=self.server.credentials)
        self.stack.push_async_callback(bus.close)
        trainer = Trainer(often(self.folder), bus, self.feeder.run, id)
        await trainer.start()
        return trainer

    async def trained(self, kept: int) -> RunFeeder:
        """Train, and go back to the store of after the first `kept` steps."""
        await self.serve()
        await declare(self.admin)
        self.feeder = RunFeeder(self.admin, new_run(), self.folder)
        await self._steps("t-0", range(kept))
        await self.stack.aclose()
        shutil.copytree(self.folder / "broker", self.folder / "copy")
        await self.serve()
        self.feeder.bus = self.admin
        await self._steps("t-1", range(kept, STEPS))
        await self.stack.aclose()
        shutil.rmtree(self.folder / "broker")
        (self.folder / "copy").rename(self.folder / "broker")
        await self.serve()
        self.feeder.bus = self.admin
        return self.feeder

    async def _steps(self, id: str, numbers: range) -> None:
        trainer = await self.trainer(id)
        for number in numbers:
            await self.feeder.batch(number)
        await self.feeder.version(numbers.stop)
        await told(self.feeder, "checkpoint", numbers.stop)
        kill(trainer)


async def test_a_broker_older_than_the_checkpoint_takes_the_run_back(tmp_path: Path) -> None:
    async with OlderBroker(tmp_path) as older:
        feeder = await older.trained(STEPS - 1)
        hashes = dict(feeder.hashes)
        trainer = await older.trainer("t-2")
        went_back = await told(feeder, "went_back")
        await feeder.batch(STEPS - 1)
        await feeder.version(STEPS)
        kill(trainer)
    assert went_back.data["checkpoint"] == f"v{STEPS - 1:08d}.safetensors" and went_back.level == "warning"
    assert feeder.hashes[STEPS] == hashes[STEPS], "the same groups were closed again: the same bits"
    names = [path.name for path in (feeder.folder / "checkpoints").iterdir()]
    assert {f"v{STEPS:08d}.ahead", "checkpoint.safetensors.ahead"} <= set(names), "nothing is deleted"


@pytest.mark.slow
async def test_tokens_of_a_version_that_is_gone_are_not_trained_on(tmp_path: Path) -> None:
    async with OlderBroker(tmp_path) as older:
        feeder = await older.trained(STEPS - 2)
        trainer = await older.trainer("t-2")
        for number in range(PER_STEP):
            await feeder.group(STEPS, number)  # an engine still serves the newest version
        for number in range(PER_STEP):
            await feeder.group(STEPS - 2, number, lag=0)
        outcomes: dict[int, StepDone | StepFailed] = {}
        async for received in feeder.bus.follow("HR_STEP", STEP.at(run=feeder.run)):
            if isinstance(received.message, StepDone | StepFailed):
                outcomes[received.message.step] = received.message
            if STEPS - 1 in outcomes:
                break
        kill(trainer)
    lost, taken = outcomes[STEPS - 2], outcomes[STEPS - 1]
    assert isinstance(lost, StepFailed) and lost.reason == REASON and f"version {STEPS}" in lost.detail
    assert isinstance(taken, StepDone), taken
    assert taken.trained_slots == GROUP * PER_STEP


async def test_without_a_checkpoint_that_the_streams_support_the_run_says_what_to_do(tmp_path: Path) -> None:
    async with OlderBroker(tmp_path) as older:
        feeder = await older.trained(1)
        folder = feeder.folder / "checkpoints"
        for file in folder.glob("v*.safetensors"):
            file.unlink()
        trainer = await older.trainer("t-2")
        error = await trainer.failed
        await trainer.shut(1.0)
    assert isinstance(error, Unrecoverable)
    assert "headrace bus restore" in str(error) and f"version {STEPS}" in str(error)
    assert (folder / "checkpoint.safetensors").exists()


async def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(connect: Connect, tmp_path: Path) -> None:
    feeder = await trained(connect, tmp_path)
    file = feeder.folder / "checkpoints" / "checkpoint.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert isinstance(await failure(connect, feeder, tmp_path), Damaged), "its supervisor starts it again"
    assert (await told(feeder, "went_back")).data["checkpoint"] == f"v{STEPS - 1:08d}.safetensors"
    hashes = dict(feeder.hashes)
    async with living(Trainer, often(tmp_path), await connect("trainer"), feeder.run, "t-3"):
        assert (await told(feeder, "step_again")).data["step"] == STEPS - 1
        await feeder.batch(STEPS)
        await feeder.version(STEPS + 1)
    assert feeder.hashes[STEPS] == hashes[STEPS], "the repeated step has the same bits"


async def test_a_kill_on_the_way_back_leaves_a_checkpoint(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a checkpoint is that of a new run, whose trainer would make version 0."""
    actor = Trainer(often(tmp_path), await connect("trainer"), new_run(), "t-1")
    for name in ("v00000001.safetensors", "v00000002.safetensors"):
        (tmp_path / name).write_text(name)
    current = tmp_path / "checkpoint.safetensors"
    current.hardlink_to(tmp_path / "v00000002.safetensors")
    missing: list[str] = []

    def watched(name: str) -> None:
        act = getattr(os, name)

        def do(*args: Any, **options: Any) -> Any:
            done = act(*args, **options)
            missing.extend([name] if not current.exists() else [])
            return done

        monkeypatch.setattr(os, name, do)

    for name in ("rename", "replace", "link", "unlink"):
        watched(name)
    await resume.replace(actor, tmp_path, Damaged("its bits"))
    assert missing == [] and current.read_text() == "v00000001.safetensors"
    assert (tmp_path / "checkpoint.safetensors.damaged").read_text() == "v00000002.safetensors"
