"""The retention of records: what a purge deletes, and that it reads every record of a step once."""

from pathlib import Path

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.checkpoint_store import CheckpointStore
from headrace.bus.connection import Bus
from headrace.messages.subjects import STEP, TRAJ
from headrace.messages.training import BatchGroup, RecordsPurged, StepManifest
from tests.conftest import Connect
from tests.support import records
from tests.support.actors import living
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = pytest.mark.anyio

STEPS = 60


async def write(bus: Bus, template: StepManifest, step: int, slots: tuple[tuple[int, int], ...]) -> None:
    """Publish the records of one step that was taken."""
    group = BatchGroup(group=f"g{step}", close_seq=1, slots=slots)
    manifest = msgspec.structs.replace(template, step=step, version=step, groups=(group,))
    await bus.publish(STEP.at(run=template.run), manifest)
    await bus.publish(STEP.at(run=template.run), records.done(step, [group.group], 1, run=template.run))


async def test_a_purge_reads_the_records_of_a_step_once_and_keeps_what_a_replay_needs(
    connect: Connect, tmp_path: Path
) -> None:
    """If each purge read HR_STEP from its beginning, the purges of n steps would read n x n records."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run) as actor:
        await feeder.batch(0)
        await feeder.version(1)
    first, trainer = next(record for record in await feeder.steps() if isinstance(record, StepManifest)), actor.trainer
    assert trainer is not None
    store = CheckpointStore(feeder.folder, trainer, config(tmp_path))
    for file in store.checkpoints.glob("v*"):
        file.unlink()
    bus = await connect("trainer")
    sampled = (await feeder.bus.get("HR_TRAJ", first.groups[0].slots[0][0])).message
    stats, took = bus.connection.client.stats, list[int]()
    places = list[int]()
    for step in range(1, STEPS + 1):
        made = msgspec.structs.replace(sampled, group=f"g{step}")
        places.append(await feeder.bus.publish(TRAJ.at(run=feeder.run, group=made.group), made))
        await write(feeder.bus, first, step, ((places[-1], 1 + step),))
        if step == STEPS:
            (store.checkpoints / f"v{STEPS - 10:08d}.safetensors").touch()
        before = stats["in_msgs"]
        old = await store.old_records(bus, feeder.run)
        purged = await store.purge(bus, old) if old is not None else 0
        took.append(stats["in_msgs"] - before)
    assert max(took[10:-1]) <= max(took[1:11]) < STEPS, f"messages that each purge received: {took}"
    kept = [received.seq async for received in feeder.bus.history("HR_TRAJ", TRAJ.where(run=feeder.run))]
    assert kept == places[STEPS - 11 :] and purged >= STEPS - 11, "steps from the oldest checkpoint on are replayed"
    assert set(store._firsts) == set(range(STEPS - 10, STEPS + 1)), "what was purged is forgotten"


async def test_a_step_of_two_incarnations_keeps_the_records_of_both(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run) as actor:
        await feeder.batch(0)
        await feeder.version(1)
    first, trainer = next(record for record in await feeder.steps() if isinstance(record, StepManifest)), actor.trainer
    assert trainer is not None
    sampled = (await feeder.bus.get("HR_TRAJ", first.groups[0].slots[0][0])).message
    made = msgspec.structs.replace(sampled, group="g1")
    early, late = [await feeder.bus.publish(TRAJ.at(run=feeder.run, group="g1"), made) for _ in range(2)]
    for place in (early, late):
        await write(feeder.bus, first, 1, ((place, place),))
    store = CheckpointStore(feeder.folder, trainer, config(tmp_path))
    (store.checkpoints / "v00000000.safetensors").unlink()
    bus = await connect("trainer")
    old = await store.old_records(bus, feeder.run)
    assert old == RecordsPurged(run=feeder.run, step=1, trajectory_seq=early, score_seq=early)
    assert await store.purge(bus, old)
    assert await store.old_records(bus, feeder.run) is None, "they are deleted once"
    kept = [received.seq async for received in feeder.bus.history("HR_TRAJ", TRAJ.where(run=feeder.run))]
    assert kept == [early, late]
