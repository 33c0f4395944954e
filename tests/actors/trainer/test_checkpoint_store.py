"""The retention of records: what a purge deletes, and that it reads every record of a step once."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from headrace.actors.rollout.turn_log import TurnLog
from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.checkpoint_store import STORED_BEFORE_S, CheckpointStore
from headrace.bus.connection import Bus
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.config import Bus as BusSection
from headrace.messages.subjects import EVENT, STEP, TRAJ, TURN
from headrace.messages.training import BatchGroup, RecordsPurged, StepManifest
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from tests.conftest import Connect
from tests.support import records
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
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


async def test_a_budget_of_bytes_drops_old_steps_alone(connect: Connect, tmp_path: Path) -> None:
    """With a budget of less than one step, all that is not trained yet and the newest staleness + 2 steps stay."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    settings = config(tmp_path, trainer={"checkpoint_every": 1}, replay={"keep_gib": 1e-9})
    async with living(Trainer, settings, await connect("trainer"), feeder.run):
        for number in range(7):
            await feeder.batch(number)
        await feeder.version(7)
        await feeder.group(7, 0)  # closed, and its batch is not full
        await settled(feeder)
    manifests = {record.step: record for record in await feeder.steps() if isinstance(record, StepManifest)}
    assert all(manifest.bytes > 1000 for manifest in manifests.values())
    places = [seq for group in manifests[4].groups for seq, _ in group.slots]
    stored = [received async for received in feeder.bus.history("HR_TRAJ", TRAJ.where(run=feeder.run))]
    assert min(places) == stored[0].seq, "step 4, the oldest of staleness + 2 = 3"
    assert {received.message.group for received in stored if received.seq > max(places)} >= {"g000014"}
    recorded = await of_run(await connect("replay"), settings, feeder.folder, feeder.run)
    assert recorded.kept() == [4, 5, 6]
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, recorded.kept())] == [True] * 3


async def settled(feeder: RunFeeder) -> None:
    """Wait for the purge after version 7."""
    async with asyncio.timeout(PATIENCE_S):
        where = EVENT.where(run=feeder.run, actor="trainer", type="event")
        purges = 0
        async for received in feeder.bus.follow("HR_EVENT", where):
            purges += received.message.kind == "purged"
            if purges == 4:
                return


@pytest.mark.parametrize(("gib", "kept"), [(0.0, 50), (2.5 * STEPS / 2**30, 3), (7.5 * STEPS / 2**30, 7), (1e6, 50)])
async def test_as_many_steps_are_kept_as_the_budget_holds(
    connect: Connect, tmp_path: Path, gib: float, kept: int
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    settings = config(tmp_path, replay={"keep_gib": gib, "keep_steps": 50})
    async with living(Trainer, settings, await connect("trainer"), feeder.run) as actor:
        await feeder.version(0)
        assert actor.trainer is not None
        store = CheckpointStore(feeder.folder, actor.trainer, settings)
    store._bytes = dict.fromkeys(range(20), STEPS)
    assert store.kept_steps() == kept
    assert actor.trainer is not None
    actor.trainer.config = config(tmp_path, curriculum={"staleness": 9})  # an operator has raised the bound
    assert store.kept_steps() == max(kept, 11)


async def test_the_turns_that_hold_a_kept_step_s_routes_stay(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run) as actor:
        await feeder.batch(0)
        await feeder.version(1)
    first, trainer = next(record for record in await feeder.steps() if isinstance(record, StepManifest)), actor.trainer
    assert trainer is not None
    bus, rollout = await connect("trainer"), await connect("rollout")
    sampled = (await feeder.bus.get("HR_TRAJ", first.groups[0].slots[0][0])).message
    turns: dict[int, int] = {}
    for step in (1, 2, 3):  # every turn is older than every trajectory
        log = TurnLog(rollout, feeder.run, f"g{step}", f"t{step}")
        await log.sampled(sampled.turns[0], "n", "s", "f")
        turns[step] = log.first
    for step in (1, 2, 3):
        made = msgspec.structs.replace(sampled, group=f"g{step}", id=f"t{step}", turns_from=turns[step])
        seq = await feeder.bus.publish(TRAJ.at(run=feeder.run, group=made.group), made)
        template = msgspec.structs.replace(first, turn_seq=turns[step])
        await write(feeder.bus, template, step, ((seq, seq),))
    store = CheckpointStore(feeder.folder, trainer, config(tmp_path))
    for file in store.checkpoints.glob("v*"):
        file.unlink()
    (store.checkpoints / "v00000002.safetensors").touch()
    old = await store.old_records(bus, feeder.run)
    assert old is not None and old.step == 2
    shared = SharedMemoryStore.from_config(BusSection(blob_dir=str(tmp_path)), feeder.run, bus.node)
    assert shared is not None
    bus.use_shared_memory(shared)
    limits: list[float] = []
    monkeypatch.setattr(shared, "collect", lambda before: limits.append(before))
    await store.purge(bus, old)
    assert limits == [(await bus.get("HR_TURN", turns[2])).time - STORED_BEFORE_S], "its files are as old"
    left = [received.seq async for received in bus.history("HR_TURN", TURN.where(run=feeder.run))]
    assert left == [turns[2], turns[3]]


async def test_a_checkpoint_that_cannot_be_written_is_an_event(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    trainer = Trainer(config(tmp_path, trainer={"checkpoint_every": 1}), await connect("trainer"), feeder.run, "t-1")
    await trainer.start()
    try:
        await feeder.version(0)
        (feeder.folder / "checkpoints").rename(feeder.folder / "gone")
        (feeder.folder / "checkpoints").touch()
        await feeder.batch(0)
        assert isinstance(await trainer.failed, OSError)
    finally:
        await trainer.shut(1.0)
    where = EVENT.where(run=feeder.run, actor="trainer", type="event")
    told = [received.message async for received in feeder.bus.history("HR_EVENT", where)]
    assert [event.level for event in told if event.kind == "checkpoint_failed"] == ["error"]
