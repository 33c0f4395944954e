"""A trainer that dies at any point, or is stopped while another takes over: the same bits, and the stopped one's
records are ignored."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.closings import Batch
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.messages.subjects import EVENT, STEP
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.training.trainer import PolicyTrainer
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.recorded_run import RunFeeder, config, kill, new_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # the shorter cases are in test_trainer.py
STEPS = 4


@pytest.fixture(scope="module")
async def straight(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Hashes of versions 0 to `STEPS` of a trainer that was never disturbed, fed the same streams."""
    folder = tmp_path_factory.mktemp("straight")
    async with (
        await as_writers(server.url, server.credentials) as admin,
        await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
    ):
        feeder = RunFeeder(admin, new_run(), folder)
        async with living(Trainer, config(folder), bus, feeder.run):
            for number in range(STEPS):
                await feeder.batch(number)
            await feeder.version(STEPS)
        return [feeder.hashes[number] for number in range(STEPS + 1)]


class Dying(Trainer):
    """Stops permanently at one point of step 1 (0-based), which ends in a checkpoint."""

    point = ""

    async def _stop_at(self, point: str) -> None:
        if self.point == point:
            self.there.set()
            await asyncio.get_running_loop().create_future()

    async def _write(self, record: StepManifest | StepDone | StepFailed) -> int:
        mine = record.step == 1 and not isinstance(record, StepFailed)
        name = "manifest" if isinstance(record, StepManifest) else "outcome"
        if mine:
            await self._stop_at(f"before its {name}")
        seq = await super()._write(record)
        if mine:
            await self._stop_at(f"after its {name}")
        return seq

    async def _keep(self, trainer: PolicyTrainer, batch: Batch) -> None:
        if trainer.version == 2:
            async with self._recording:  # its outcome is on the bus
                pass
            await self._stop_at("before its checkpoint")
        await super()._keep(trainer, batch)
        if trainer.version == 2:
            await self._stop_at("after its checkpoint")

    async def start(self) -> None:
        self.there = asyncio.Event()
        await super().start()


POINTS = (
    "before its manifest",
    "after its manifest",
    "before its outcome",
    "after its outcome",
    "before its checkpoint",
    "after its checkpoint",
)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_any_point_of_a_step_it_goes_on_with_the_same_bits(
    connect: Connect, tmp_path: Path, straight: list[str], point: str
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    first = Dying(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    first.point = point
    await first.start()
    await feeder.batch(0)
    await feeder.batch(1)
    await first.there.wait()
    kill(first)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-2"):
        for number in range(2, STEPS):
            await feeder.batch(number)
        await feeder.version(STEPS)
    await as_if_nothing_had_happened(feeder, straight)


async def as_if_nothing_had_happened(feeder: RunFeeder, straight: list[str]) -> None:
    """Every version has its bits, every step one manifest and one outcome, and nothing was made twice."""
    assert [feeder.hashes[number] for number in range(STEPS + 1)] == straight
    records = await feeder.steps()
    assert [(type(r).__name__, r.step) for r in records] == [
        (kind, step) for step in range(STEPS) for kind in ("StepManifest", "StepDone")
    ]
    assert all(record.incarnation == 0 for record in records)


ZOMBIE = (
    "import msgspec, sys, uvloop\n"
    "from headrace.actors.trainer.actor import Trainer\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
    "uvloop.run(run_actors([(Trainer, 'zombie')], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))"
)


async def heard(bus: Bus, feeder: RunFeeder, kind: str) -> Any:
    """The first event of a kind from this run's trainers."""
    async for received in bus.follow("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer", type="event")):
        if received.message.kind == kind:
            return received.message
    raise AssertionError


async def test_one_that_sleeps_while_another_takes_over_wakes_up_refused(
    connect: Connect, server: Server, tmp_path: Path, straight: list[str]
) -> None:
    """A real process, SIGSTOP behind the manifest of step 1; it wakes when its successor has taken that step."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    setting = config(tmp_path)
    arguments = [msgspec.json.encode(setting).decode(), feeder.run, server.url, str(server.credentials)]
    zombie = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", ZOMBIE, *arguments),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await feeder.batch(0)
        await feeder.batch(1)
        async for received in feeder.bus.follow("HR_STEP", STEP.at(run=feeder.run)):
            if isinstance(received.message, StepManifest) and received.message.step == 1:
                break
        zombie.send_signal(signal.SIGSTOP)
        async with living(Trainer, setting, await connect("trainer"), feeder.run, "successor"):
            await feeder.version(2)
            zombie.send_signal(signal.SIGCONT)
            for number in range(2, STEPS):
                await feeder.batch(number)
            await feeder.version(STEPS)
            told = await heard(feeder.bus, feeder, "superseded")
        assert told.id == "zombie"
    finally:
        zombie.kill()
        await zombie.wait()
    await as_if_nothing_had_happened(feeder, straight)


async def test_what_a_zombie_writes_is_refused_whatever_it_is(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    old = Trainer(config(tmp_path), await connect("trainer"), feeder.run, "t-old")
    await old.start()
    await feeder.batch(0)
    await feeder.version(1)
    kill(old)  # its tasks have ended, its sequence stays
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-new"):
        await feeder.batch(1)
        await feeder.version(2)
        before = await feeder.steps()
        for record in before:
            with pytest.raises(WrongSequence):
                await old._write(msgspec.structs.replace(record, incarnation=7))
        assert await feeder.steps() == before
