"""Records are fetched ahead, but not while a step begins."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.actors.trainer.closings import Closings
from headrace.messages.rollout import Trajectory
from tests.conftest import Connect
from tests.support import world
from tests.support.recorded_run import RunFeeder, new_run

pytestmark = pytest.mark.anyio


async def test_no_record_is_fetched_between_a_batch_and_its_first_forward_pass(
    connect: Connect, tmp_path: Path
) -> None:
    bus = await connect()
    feeder, fetched = RunFeeder(bus, new_run(), tmp_path), asyncio.Queue[int]()
    feeder.models[0] = world.model()
    for number in range(5):
        name = f"g{number:06d}"
        await feeder.close(name, world.episodes(feeder.models, [world.Sampled(name, 0, number)], [0] * 4), 0)

    def expect(trajectories: Mapping[int, Trajectory]) -> None:
        fetched.put_nowait(len(trajectories))

    closings = Closings(bus, feeder.run, 1)
    closings.hold()  # no batch is ready: it holds nothing
    following = asyncio.create_task(closings.follow(0, expect))
    for _ in range(3):
        assert await fetched.get() == 1, "two are ready and one waits for its place"
    closings.hold()
    assert (await closings.ready.get()).group.group == "g000000"
    for _ in range(20):  # as many round trips as fetching takes several times over
        await feeder.steps()
    assert fetched.empty()
    await asyncio.to_thread(closings.resume)
    assert await fetched.get() == 1
    following.cancel()
    await asyncio.wait({following})
