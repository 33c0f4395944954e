"""A step of several ranks is replayed by as many on this machine; with fewer its tensors are compared."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.config import Config
from headrace.messages.training import StepManifest
from headrace.replay import bundle
from headrace.replay.recorded_run import RecordedRun, of_run
from headrace.replay.step import Rerun, attempt, compare, replay_steps
from tests.actors.trainer.test_ranks import Uneven, several
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import new_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


def setting(folder: Path, ranks: int) -> Config:
    made = several(folder, ranks)
    return msgspec.structs.replace(made, curriculum=msgspec.structs.replace(made.curriculum, group_size=4))


async def recorded_run(connect: Connect, folder: Path, lives: tuple[tuple[int, int], ...]) -> RecordedRun:
    """A run of some lives, each with a number of ranks and of steps; a checkpoint after every second step. A batch has
    more micro-batches than two ranks add up at once."""
    feeder, first = Uneven(await connect(), new_run(), folder), 0
    feeder.size = 4
    for ranks, steps in lives:
        async with living(Trainer, setting(folder, ranks), await connect("trainer"), feeder.run):
            for number in range(first, first + steps):
                await feeder.batch(number)
            first += steps
            await feeder.version(first)
    manifests = [record for record in await feeder.steps() if isinstance(record, StepManifest)]
    told = [record.layout.ranks if record.layout is not None else 1 for record in manifests]
    assert told == [ranks for ranks, steps in lives for _ in range(steps)]
    # The configuration of the last life: a manifest says how a step was taken.
    return await of_run(await connect("replay"), setting(folder, lives[-1][0]), feeder.folder, feeder.run)


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
    await assert_one_process_is_compared(recorded)


async def assert_one_process_is_compared(recorded: RecordedRun) -> None:
    """A machine that can start one rank takes the steps in one process; the tensors differ by rounding. It is seen when
    they differ by more."""
    with Rerun(recorded, most=1) as rerun:
        for step in (1, 3):
            loaded = await rerun.reach(step)
            assert loaded.trainer.layout is None
            line = compare(loaded, attempt(loaded))
            assert (line.bitwise_equal, line.layout_match, line.holds) == (False, False, True)
            assert {each.tensor for each in line.differences} == set(loaded.trainer.state.master)
            print(step, line.differences[:3])
        loaded = await rerun.reach(4)
        assert not compare(loaded, attempt(loaded)).holds, "no checkpoint of version 5 is kept to compare with"
        loaded = await rerun.reach(1)
        faster = msgspec.structs.replace(loaded.trainer.config.algorithm, learning_rate=1.1e-2)
        loaded.trainer.config = msgspec.structs.replace(loaded.trainer.config, algorithm=faster)
        line = compare(loaded, attempt(loaded))
        print(line.differences[0], line.differences[-1])
        assert not line.holds and line.differences[0].difference > line.differences[0].bound


async def test_a_replay_follows_the_ranks_of_each_step(connect: Connect, server: Server, tmp_path: Path) -> None:
    recorded = await recorded_run(connect, tmp_path, ((2, 2), (1, 2)))
    kept = dataclasses.replace(recorded, checkpoints={0: recorded.checkpoints[0]})
    with Rerun(kept) as rerun:
        loaded = await rerun.reach(2)
        assert (rerun.strayed, loaded.trainer.layout) == (-1, None)
        assert compare(loaded, attempt(loaded)).bitwise_equal
        earlier = bundle.write(kept, await rerun.reach(0), tmp_path / "bundle")
    (line,) = [line async for line in replay_steps(bundle.read(earlier), [0])]
    assert line.bitwise_equal and line.layout_match, "a bundle of a step of two ranks"
