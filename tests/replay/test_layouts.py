"""A step of several ranks is replayed by as many on this machine; with fewer its tensors are compared."""

import dataclasses
from pathlib import Path

import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.messages.training import StepManifest
from headrace.replay.recorded_run import RecordedRun, of_run
from headrace.replay.step import Rerun, attempt, compare, replay_steps
from tests.actors.trainer.test_ranks import Uneven, several
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import new_run

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]


async def recorded_run(connect: Connect, folder: Path, lives: tuple[tuple[int, int], ...]) -> RecordedRun:
    """A run of some lives, each with a number of ranks and of steps; a checkpoint after every second step."""
    feeder, first = Uneven(await connect(), new_run(), folder), 0
    for ranks, steps in lives:
        async with living(Trainer, several(folder, ranks), await connect("trainer"), feeder.run):
            for number in range(first, first + steps):
                await feeder.batch(number)
            first += steps
            await feeder.version(first)
    manifests = [record for record in await feeder.steps() if isinstance(record, StepManifest)]
    told = [record.layout.ranks if record.layout is not None else 1 for record in manifests]
    assert told == [ranks for ranks, steps in lives for _ in range(steps)]
    # The configuration of the last life: a manifest says how a step was taken.
    return await of_run(await connect("replay"), several(folder, lives[-1][0]), feeder.folder, feeder.run)


async def test_five_of_five_steps_of_two_ranks_have_their_bits(
    connect: Connect, server: Server, tmp_path: Path
) -> None:
    recorded = await recorded_run(connect, tmp_path, ((2, 5),))
    layout = recorded.manifests[0].layout
    assert layout is not None and (layout.ranks, layout.nodes, layout.backend) == (2, 1, "gloo")
    lines = [line async for line in replay_steps(recorded, range(5))]
    assert [(line.step, line.bitwise_equal, line.layout_match) for line in lines] == [(n, True, True) for n in range(5)]
    assert all(line.holds and not line.differences for line in lines)
    assert not ranks_of(), "the ranks of a replay end with it"


@pytest.mark.slow
async def test_a_replay_follows_the_ranks_of_each_step(connect: Connect, server: Server, tmp_path: Path) -> None:
    recorded = await recorded_run(connect, tmp_path, ((2, 1), (1, 2)))
    kept = dataclasses.replace(recorded, checkpoints={0: recorded.checkpoints[0]})
    with Rerun(kept) as rerun:
        loaded = await rerun.reach(2)
        assert (rerun.strayed, loaded.trainer.layout) == (-1, None)
        assert compare(loaded, attempt(loaded)).bitwise_equal
