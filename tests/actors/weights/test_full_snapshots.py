"""Full snapshots as objects at a location, over a real broker, real files and real HTTP: one copy per region, and
nothing that a location sends is used unless the signed manifest has its hash."""

import fcntl
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.errors import Unrecoverable
from headrace.messages.evaluation import EvalRequest
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT, WEIGHT_CHUNK, WEIGHT_MANIFEST
from headrace.weights import chain, snapshot
from headrace.weights.full.location import Location
from headrace.weights.publishing import collect
from tests.conftest import Connect
from tests.support.loopback import serving
from tests.support.object_server import ObjectServer
from tests.support.patience import PATIENCE_S
from tests.support.s3 import NEEDS_S3, bucket
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    far = str(tmp_path / "far")
    out = await WeightRun(connect, tmp_path, full_snapshots_url=far, anchor_every=1, keep=2).open()
    out.tensors = model(wide=2000)
    yield out
    await out.close()


def settings(run: WeightRun, **weights: Any) -> None:
    """Other values of [weights] for the actors that start from now on."""
    run.config = msgspec.structs.replace(run.config, weights=msgspec.structs.replace(run.config.weights, **weights))


def objects(run: WeightRun) -> dict[int, Path]:
    """The objects at the location, by version."""
    return {int(path.name.partition("-")[0]): path for path in (run.folder / "far" / run.id).glob("[0-9]*")}


async def published(run: WeightRun, wide: int = 100_000) -> Path:
    """Version 0, published by a sender that is gone; its object."""
    run.tensors = model(wide=wide)
    sender = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.event("published"))
    await sender.shut(1.0)
    return objects(run)[0]


async def staged(run: WeightRun, version: int, node: str = "n1") -> None:
    """Wait for a version on a node; it has the trainer's bits."""
    message = await within(PATIENCE_S, run.staged(version, node=node))
    assert snapshot.file_hash(message.path) == run.hashes[version]


async def test_a_full_snapshot_is_no_record_of_the_stream(run: WeightRun) -> None:
    path = await published(run)
    head = (await run.heads())[0]
    full = await chain.manifest(run.bus, run.id, head.full_seq)
    assert full.detached and path.stat().st_size == full.wire_bytes == sum(info.bytes for info in full.chunks)
    assert full.wire_bytes < 0.8 * full.raw_bytes and {info.stream_seq for info in full.chunks} == {0}
    assert await run.bus.last(chain.STREAM, WEIGHT_CHUNK.where(run=run.id, version=0, shard="*")) is None
    await run.actor(WeightReceiver)
    await staged(run, 0)


async def test_the_objects_of_old_chains_go_with_them_and_pins_keep_theirs(run: WeightRun, connect: Connect) -> None:
    sender = await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    for version in range(7):
        await run.train(version)
        await staged(run, version)
    request = EvalRequest(run=run.id, id="e", suite="s", policy=PolicyRef("pinned", 3), tasks=1)
    await run.bus.publish(EVENT.at(run=run.id, actor="operator", type="eval_request"), request)
    await within(PATIENCE_S, run.event("published", "version 6"))
    trainer = await connect("trainer")
    assert set(objects(run)) >= {0, 1, 2, 3, 4, 5}
    pins = await collect.pinned(run.bus, run.id)
    gone = await collect.collect(
        run.bus, lambda subject: trainer.purge(chain.STREAM, subject=subject), run.id, chains=2, pins=pins
    )
    assert sorted(gone) == [0, 1], "version 3 is built from full snapshot 2"
    await run.train(7)
    await staged(run, 7)
    await sender.shut(5.0)
    await run.actor(WeightSender)  # a restart looks for such objects, too
    await run.train(8)
    await staged(run, 8)
    assert not {0, 1} & set(objects(run)) and {2, 4, 5, 6} <= set(objects(run))
    await run.actor(WeightReceiver, node="n2")
    await staged(run, 3, "n2")
    await staged(run, 8, "n2")


async def test_a_sender_removes_what_one_that_was_killed_left(run: WeightRun) -> None:
    part = run.folder / "far" / run.id / ".0-ab.chunks.0123.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    await run.actor(WeightSender)
    assert not part.exists()


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "gone"])
async def test_a_damaged_object_is_never_staged(run: WeightRun, damage: str) -> None:
    path = await published(run, wide=2000)
    whole = path.read_bytes()
    wrong = {"flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "short": whole[:-1], "empty": b"", "gone": b""}[damage]
    path.write_bytes(wrong) if damage != "gone" else path.unlink()
    receiver = await run.actor(WeightReceiver)
    await within(PATIENCE_S, run.event("stage_failed" if damage == "flipped" else "no_full_snapshot", "version 0"))
    assert receiver.store.versions() == [] and list(receiver.store.folder.iterdir()) == []
    await receiver.shut(1.0)
    path.write_bytes(whole)
    await run.actor(WeightReceiver)
    await staged(run, 0)


async def test_nodes_of_a_region_that_start_at_once_read_the_location_once(run: WeightRun) -> None:
    path = await published(run)
    server = ObjectServer(run.folder / "far")
    server.gate.clear()
    async with serving(server.app()) as url:
        settings(run, full_snapshots_url=url, region_dir=str(run.folder / "eu"))
        for node in ("n1", "n2", "n3"):
            await run.actor(WeightReceiver, node=node)
        await within(PATIENCE_S, server.begun.wait())
        server.gate.set()
        for node in ("n1", "n2", "n3"):
            await staged(run, 0, node)
        assert server.bytes == path.stat().st_size and len(set(server.served)) == len(server.served) > 1
        assert (run.folder / "eu" / run.id / path.name).read_bytes() == path.read_bytes()
        await run.actor(WeightReceiver, node="late")
        await staged(run, 0, "late")
        assert server.bytes == path.stat().st_size, "a node that joins late reads the copy"


async def test_what_a_killed_node_had_copied_is_read_once(run: WeightRun) -> None:
    path = await published(run)
    manifest = await chain.manifest(run.bus, run.id, (await run.heads())[0].full_seq)
    there = sum(info.bytes for info in manifest.chunks[:9])
    folder = run.folder / "eu" / run.id
    folder.mkdir(parents=True)
    (folder / f".{path.name}.part").write_bytes(path.read_bytes()[:there] + b"\1" * 2_000_000)
    server = ObjectServer(run.folder / "far")
    async with serving(server.app()) as url:
        settings(run, full_snapshots_url=url, region_dir=str(run.folder / "eu"))
        await run.actor(WeightReceiver)
        await staged(run, 0)
    assert server.bytes == path.stat().st_size - there > 0
    assert sorted(each.name for each in folder.iterdir()) == [".lock", path.name]


async def test_a_damaged_copy_is_removed_and_the_location_is_read(run: WeightRun) -> None:
    path = await published(run, wide=2000)
    copy = run.folder / "eu" / run.id / path.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    settings(run, region_dir=str(run.folder / "eu"))
    await run.actor(WeightReceiver)
    await staged(run, 0)
    assert str(copy) in await within(PATIENCE_S, run.event("copy_failed")) and not copy.exists()


async def test_a_folder_of_copies_that_cannot_be_written_costs_the_copy_alone(run: WeightRun) -> None:
    await published(run, wide=2000)
    (run.folder / "eu").write_text("a file")
    settings(run, region_dir=str(run.folder / "eu"))
    await run.actor(WeightReceiver)
    await staged(run, 0)
    assert str(run.folder / "eu") in await within(PATIENCE_S, run.event("copy_failed"))


async def test_a_node_that_stands_still_with_the_lock_is_not_waited_for(
    run: WeightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.weights.full.snapshots.STALLED_S", 0.3)
    await published(run, wide=2000)
    (run.folder / "eu" / run.id).mkdir(parents=True)
    settings(run, region_dir=str(run.folder / "eu"))
    with (run.folder / "eu" / run.id / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        await run.actor(WeightReceiver)
        await staged(run, 0)
    assert "has written nothing for 0.3 s" in await within(PATIENCE_S, run.event("copy_failed"))


async def test_a_region_keeps_few_copies(run: WeightRun) -> None:
    settings(run, region_dir=str(run.folder / "eu"))
    await run.actor(WeightSender)
    for version in range(6):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
        await run.actor(WeightReceiver, node=f"n{version}")
        await staged(run, version, f"n{version}")
    held = sorted(int(path.name.partition("-")[0]) for path in (run.folder / "eu" / run.id).glob("[0-9]*"))
    assert held == [2, 3, 4]


async def test_a_node_that_wants_some_shards_reads_their_chunks_alone(run: WeightRun) -> None:
    settings(run, shards=3)
    path = await published(run, wide=60_000)
    server = ObjectServer(run.folder / "far")
    async with serving(server.app()) as url:
        settings(run, full_snapshots_url=url, want=("layers.0.norm",))
        await run.actor(WeightReceiver)
        await within(PATIENCE_S, run.staged(0))
    manifest = await chain.manifest(run.bus, run.id, (await run.heads())[0].full_seq)
    (shard,) = {info.shard for info in manifest.tensors if info.name == "layers.0.norm"}
    wanted = sum(info.bytes for info in manifest.chunks if info.shard == shard)
    assert server.bytes == wanted < path.stat().st_size


async def test_a_sender_that_lost_its_files_builds_its_base_from_the_object(run: WeightRun) -> None:
    settings(run, anchor_every=9)
    first = await run.actor(WeightSender)
    for version in (0, 1):
        await run.train(version)
        await within(PATIENCE_S, run.event("published", f"version {version}:"))
    await first.shut(1.0)
    shutil.rmtree(first.store.folder)
    for version in (0, 1):
        run.path(version).unlink()
    await run.actor(WeightSender)
    await run.train(2)
    await run.actor(WeightReceiver)
    await staged(run, 2)
    assert "version 1 was built again" in await within(PATIENCE_S, run.event("base_rebuilt"))
    assert [head.full_version for head in await run.heads()] == [0, 0, 0], "the chain goes on"


async def test_a_full_snapshot_that_is_lost_is_published_again(run: WeightRun) -> None:
    settings(run, anchor_every=9)
    await published(run, wide=2000)
    shutil.rmtree(run.folder / "far")
    shutil.rmtree(run.folder / run.id / "nodes")
    await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    await run.train(1)
    await staged(run, 1)
    assert "publishing version 1 as a full snapshot" in await within(PATIENCE_S, run.event("base_lost"))
    assert (await run.heads())[-1].full_version == 1
    objects(run)[1].unlink()  # the sender still has the file, so only the object is made again
    await run.train(2)
    await within(PATIENCE_S, run.event("published", "version 2:"))
    await run.train(3)
    await staged(run, 3)
    assert (await run.heads())[-1].full_version == 2 and 2 in objects(run)


async def test_a_location_that_cannot_be_opened_ends_the_actor_with_the_key_to_set(run: WeightRun) -> None:
    settings(run, full_snapshots_url="nowhere://bucket")
    for kind in (WeightSender, WeightReceiver):
        with pytest.raises(Unrecoverable, match=r"\[weights\] full_snapshots_url: nowhere://bucket"):
            await run.actor(kind)


async def test_a_location_that_does_not_answer_is_asked_again_until_it_does(
    run: WeightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.weight_sender.AGAIN_S", 0.05)
    (run.folder / "far").write_text("a file")
    await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    await run.train(0)
    assert "cannot store 0-" in await within(PATIENCE_S, run.event("full_snapshot_failed"))
    (run.folder / "far").unlink()
    await staged(run, 0)
    path = objects(run)[0]
    path.parent.rename(run.folder / "away")  # a full snapshot beside a version that is committed
    path.parent.write_text("a file")
    await run.train(1)
    await within(PATIENCE_S, run.event("full_snapshot_failed", "version 1"))
    await staged(run, 1)
    path.parent.unlink()
    await run.train(2)
    await staged(run, 2)
    assert [head.version for head in await run.heads()] == [0, 1, 2]
    async for received in run.bus.follow("HR_WEIGHTS", WEIGHT_MANIFEST.where(run=run.id)):
        if received.message.base_version < 0 and received.message.version:
            break
    assert received.message.version in objects(run)


@NEEDS_S3
async def test_full_snapshots_go_through_s3(run: WeightRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as url:
        settings(run, full_snapshots_url=f"{url}/weights", region_dir=str(run.folder / "eu"), shards=3)
        await run.actor(WeightSender)
        for version in range(2):
            await run.train(version)
            await within(PATIENCE_S, run.event("published", f"version {version}:"))
        for node in ("n1", "n2"):
            await run.actor(WeightReceiver, node=node)
            await staged(run, 1, node)
        held = Location(f"{url}/weights/{run.id}").versions()
        assert sorted(held.values()) == [0, 1] and not (run.folder / "far").exists()
        await run.close()


@pytest.mark.parametrize("damage", ["lost", "changed"])
async def test_a_receiver_that_lacks_a_chunk_asks_and_gets_a_full_snapshot(
    run: WeightRun, connect: Connect, damage: str
) -> None:
    """One chunk of a delta would otherwise stop every receiver until the next full snapshot is due."""
    settings(run, anchor_every=32)
    admin = await connect("admin")
    sender = await run.actor(WeightSender)
    for version in range(3):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    async for received in admin.history("HR_WEIGHTS", WEIGHT_CHUNK.where(run=run.id, version=2)):
        await admin.delete("HR_WEIGHTS", received.seq)
    if damage == "changed":
        await admin.publish(received.subject, msgspec.structs.replace(received.message, data=b"other"))
    await run.actor(WeightReceiver)
    staged = await within(PATIENCE_S, run.staged(2))
    assert snapshot.file_hash(staged.path) == run.hashes[2]
    assert sorted(objects(run)) == [0, 2], "a full snapshot of the version that could not be built"
    await run.train(3)
    assert (await within(PATIENCE_S, run.head(3))).full_version == 2
    await within(PATIENCE_S, run.staged(3))
    assert sorted(objects(run)) == [0, 2], "one is enough"
    assert not sender.failed.done()
