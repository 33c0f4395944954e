"""An operator's orders: other settings and a rollback are on record, survive a kill, and replay bit for bit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.cli.main import main
from headrace.config import Mesh
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone, StepFailed, StepManifest, TrainerOrder
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.recorded_run import RunFeeder, config, kill, new_run

pytestmark = pytest.mark.anyio


async def order(bus: Bus, run: str, **fields: Any) -> Event:
    """Publish an order; the trainer's answer."""
    where = EVENT.at(run=run, actor="operator", type=TrainerOrder.type_name)
    seq = await bus.publish(where, TrainerOrder(run=run, **fields))
    async with asyncio.timeout(PATIENCE_S):
        async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="trainer", type="event")):
            if isinstance(received.message, Event) and received.message.data.get("order") == seq:
                return received.message
    raise AssertionError


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_rollback_and_another_rate_are_on_record_and_replay(
    connect: Connect, tmp_path: Path, ranks: int
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    operator = await connect("operator")
    settings = config(tmp_path, trainer={"checkpoint_every": 2, "mesh": Mesh(shard=ranks)})
    first = Trainer(settings, await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(4):
        await feeder.batch(number)
    await feeder.version(4)
    assert (await order(operator, feeder.run, settings={"learning_rate": 2e-4})).kind == "order_accepted"
    refusals = [
        await order(operator, feeder.run, restore=3),
        await order(operator, feeder.run, settings={"moments": "eight_bit"}),
        await order(operator, feeder.run, settings={"learning_rate": -1.0}),
    ]
    assert [answer.kind for answer in refusals] == ["order_refused"] * 3
    assert "there are 0, 2" in refusals[0].text
    rolled = await order(operator, feeder.run, restore=2)
    assert rolled.kind == "order_accepted"
    if ranks == 1:
        kill(first)
    else:
        await first.shut(10.0)
    async with living(Trainer, settings, await connect("trainer"), feeder.run, "t-2"):
        for number in range(4, 8):
            await feeder.batch(number)
        await feeder.version(8)
    records = await feeder.steps()
    manifests = {r.step: r for r in records if isinstance(r, StepManifest)}
    outcomes = {r.step: r for r in records if isinstance(r, StepDone | StepFailed)}
    assert [manifests[step].restore for step in range(8)] == [-1, -1, -1, -1, 2, -1, -1, -1]
    rates = [manifests[step].objective["learning_rate"] for step in range(8)]
    assert rates == [settings.algorithm.learning_rate] * 4 + [2e-4] * 4
    assert manifests[7].ordered == {"learning_rate": 2e-4} and manifests[7].orders == manifests[4].orders > 0
    back, late = outcomes[4], outcomes[5]
    assert isinstance(back, StepFailed) and (back.reason, back.restored) == ("rolled_back", 2)
    assert back.state_hash == feeder.hashes[2] == feeder.hashes[5] != feeder.hashes[4]
    assert isinstance(late, StepFailed) and late.reason == "discarded_version", "tokens of version 4"
    assert isinstance(outcomes[6], StepDone) and outcomes[6].learning_rate == 2e-4
    recorded = await of_run(await connect("replay"), settings, feeder.folder, feeder.run)
    assert 5 in recorded.checkpoints, "a rollback is followed by a checkpoint"
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, range(8))] == [True] * 8


async def test_a_trainer_that_was_killed_goes_on_as_one_that_was_not(connect: Connect, tmp_path: Path) -> None:
    hashes: list[dict[int, str]] = []
    for killed in (False, True):
        feeder = RunFeeder(await connect(), new_run(), tmp_path / str(killed))
        settings, operator = config(tmp_path / str(killed)), await connect("operator")
        trainer = Trainer(settings, await connect("trainer"), feeder.run, "t-1")
        await trainer.start()
        for number in range(3):
            await feeder.batch(number)
        await feeder.version(3)
        await order(operator, feeder.run, restore=2, settings={"learning_rate": 3e-4})
        await feeder.batch(3)
        await feeder.version(4)
        if killed:
            kill(trainer)
            trainer = Trainer(settings, await connect("trainer"), feeder.run, "t-2")
            await trainer.start()
        for number in range(4, 6):
            await feeder.batch(number)
        await feeder.version(6)
        await trainer.shut(1.0)
        hashes.append(feeder.hashes)
        assert all(r.incarnation == 0 for r in await feeder.steps())
    assert hashes[0] == hashes[1]


async def test_the_commands_print_the_trainer_s_answer(
    connect: Connect, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    toml = tmp_path / "run.toml"
    toml.write_text(f'[run]\nid = "{feeder.run}"\n[bus]\nurl = "{server.url}"\ncredentials = "{server.credentials}"\n')

    async def said(code: int, *words: str) -> str:
        assert await asyncio.to_thread(main, [*words, "--config", str(toml)]) == code
        out = capsys.readouterr()
        return out.out + out.err

    change, back = ("trainer", "set", feeder.run), ("trainer", "rollback", feeder.run, "--to")
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run):
        await feeder.version(0)
        assert "algorithm.grad_clip = 0.5" in await said(0, *change, "algorithm.grad_clip=0.5")
        assert "back to version 0" in await said(0, *back, "0")
        assert "no checkpoint of version 7 is kept" in await said(1, *back, "7")
        assert "algorithm.moments stays as it is" in await said(1, *change, "algorithm.moments=eight_bit")
        assert "trainer.threads" in await said(2, *change, "trainer.threads=4")
