"""A past step gives the same bits, and says so when it does not or cannot."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from headrace.actors.trainer import Trainer
from headrace.bus.connection import Bus
from headrace.bus.server import Server
from headrace.config import Config
from headrace.messages.subjects import STEP, TRAJ
from headrace.messages.training import StepDone, StepFailed
from headrace.replay.step import ReplayError, nearest, replay_step
from tests.actors.living import living
from tests.conftest import Connect
from tests.river import River, config, new_run

pytestmark = pytest.mark.anyio
STEPS = 4


class Past(NamedTuple):
    run: str
    setting: Config
    folder: Path


@pytest.fixture(scope="module")
async def past(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Past]:
    """A run of four steps, one of which failed, with a checkpoint every second."""
    folder = tmp_path_factory.mktemp("past")
    async with (
        await Bus.connect(server.url, role="admin", credentials=server.credentials) as admin,
        await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
    ):
        river = River(admin, new_run(), folder)
        async with living(Trainer, config(folder), bus, river.run):
            for number in range(STEPS):
                await river.batch(number, spoilt=number == 2)
            await river.version(STEPS)
        yield Past(river.run, config(folder), folder / river.run)


@pytest.mark.parametrize("step", range(STEPS))
async def test_every_step_has_the_bits_that_were_published(connect: Connect, past: Past, step: int) -> None:
    found = await replay_step(await connect("replay"), past.setting, past.folder, past.run, step)
    records = [r.message async for r in (await connect()).history("HR_STEP", STEP.at(run=past.run))]
    known = next(r for r in records if isinstance(r, StepDone | StepFailed) and r.step == step)
    assert found.bitwise_equal
    assert found.fingerprint_match
    assert found.weights_hash == known.state_hash
    assert isinstance(known, StepFailed) == (step == 2)
    assert list(msgspec.to_builtins(found)) == [
        "step",
        "bitwise_equal",
        "loss",
        "grad_norm",
        "weights_hash",
        "fingerprint_match",
    ]


async def test_the_manifest_says_how_a_step_is_computed_not_the_configuration(connect: Connect, past: Past) -> None:
    slower = msgspec.structs.replace(past.setting.algorithm, learning_rate=1e-3)
    other = msgspec.structs.replace(past.setting, algorithm=slower)
    assert (await replay_step(await connect("replay"), other, past.folder, past.run, 1)).bitwise_equal


async def test_another_objective_gives_other_bits(connect: Connect, past: Past) -> None:
    bus = await connect("replay")
    found = await replay_step(bus, past.setting, past.folder, past.run, 1, {"learning_rate": 1e-3})
    assert not found.bitwise_equal


async def test_what_cannot_be_replayed_is_said(connect: Connect, past: Past, tmp_path: Path) -> None:
    bus = await connect("replay")
    with pytest.raises(ReplayError, match="no finished step 9; it has 0 to 3"):
        await replay_step(bus, past.setting, past.folder, past.run, 9)
    with pytest.raises(ReplayError, match="holds no checkpoint of version 1 or before"):
        await replay_step(bus, past.setting, tmp_path, past.run, 1)
    gone = await (await connect()).purge("HR_TRAJ", subject=TRAJ.at(run=past.run, group="g000006"))
    assert gone == 2
    with pytest.raises(ReplayError, match="purged: group g000006 of step 3"):
        await replay_step(bus, past.setting, past.folder, past.run, 3)


def test_the_nearest_checkpoint_is_the_newest_that_is_not_too_new(tmp_path: Path) -> None:
    for version in (0, 10, 20):
        (tmp_path / f"v{version:08d}.safetensors").touch()
    found = [nearest(tmp_path, step) for step in (0, 9, 10, 25)]
    assert [path.name[7:9] for path in found if path is not None] == ["00", "00", "10", "20"]
