"""Versions from a sender at the hub to receivers in four regions, over real brokers with the configuration of
deploy/regions."""

from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
import torch

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.connection import Bus
from headrace.bus.payloads import retention
from headrace.messages.subjects import EVENT, WEIGHT_MANIFEST
from headrace.weights import chain, snapshot
from tests.support.loopback import serving
from tests.support.object_server import ObjectServer
from tests.support.patience import PATIENCE_S
from tests.support.region_brokers import World, world
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio
NAMES = ("ap", "eu", "sa", "us")


@pytest.fixture(scope="module")
async def brokers(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("regions")) as out:
        for name in NAMES:
            await out.join(name)
        yield out


@pytest.fixture
async def run(brokers: World, tmp_path: Path) -> AsyncIterator[WeightRun]:
    async def at_hub(role: str = "admin", **options: Any) -> Bus:
        return await brokers.connect(role, **options)

    out = await WeightRun(at_hub, tmp_path, anchor_every=3).open()
    yield out
    await out.close()
    await brokers.hang_up()


async def receiver(run: WeightRun, brokers: World, region: str) -> WeightReceiver:
    """A receiver in a region, started; its node has the region's name."""
    bus = await brokers.connect("weight_sync", region=region, node=region)
    run.config = msgspec.structs.replace(run.config, weights=msgspec.structs.replace(run.config.weights, region=region))
    return await run.actor(WeightReceiver, bus=bus)


async def test_four_regions_stage_a_version_from_their_own_mirrors(run: WeightRun, brokers: World) -> None:
    await run.actor(WeightSender)
    for name in NAMES:
        await receiver(run, brokers, name)
    for version in range(2):
        await run.train(version)
        for name in NAMES:
            staged = await within(PATIENCE_S, run.staged(version, node=name))
            assert (staged.region, staged.state_hash) == (name, run.hashes[version])
            assert snapshot.file_hash(staged.path) == run.hashes[version]


async def test_a_node_that_joins_late_in_each_region_reads_the_full_snapshot_once(
    run: WeightRun, brokers: World
) -> None:
    """One of two nodes of each region reads the location, and deltas come from the region's mirror."""
    run.tensors = model(wide=100_000)
    far = run.folder / "far"
    section = msgspec.structs.replace(run.config.weights, full_snapshots_url=str(far))
    run.config = msgspec.structs.replace(run.config, weights=section)
    await run.actor(WeightSender)
    for version in range(2):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    server = ObjectServer(far)
    async with serving(server.app()) as url:
        for name in NAMES:
            copies = str(run.folder / "copies" / name)
            section = msgspec.structs.replace(run.config.weights, full_snapshots_url=url, region_dir=copies)
            run.config = msgspec.structs.replace(run.config, weights=section)
            await receiver(run, brokers, name)
            await run.actor(WeightReceiver, bus=await brokers.connect("weight_sync", region=name, node=f"{name}-2"))
        for name in NAMES:
            for node in (name, f"{name}-2"):
                staged = await within(PATIENCE_S, run.staged(1, node=node))
                assert (staged.region, snapshot.file_hash(staged.path)) == (name, run.hashes[1])
    full = await chain.manifest(run.bus, run.id, (await run.heads())[0].full_seq)
    assert server.bytes == len(NAMES) * full.wire_bytes


async def test_a_collection_in_a_region_leaves_the_payloads_of_the_hub(run: WeightRun, brokers: World) -> None:
    run.tensors = {token_hex(500): torch.full((2,), float(number)) for number in range(1200)}
    sender = await run.actor(WeightSender)
    await receiver(run, brokers, "eu")
    await run.train(0)
    await within(PATIENCE_S, run.staged(0, node="eu"))
    where = WEIGHT_MANIFEST.at(run=run.id, version=0)
    before = await run.bus.subjects("HR_BLOB", "hr.blob.>")
    admin = await brokers.connect("admin", region="eu")
    assert await retention.purge_all(admin, "HR_WEIGHTS", where) == 1, "of the mirror"
    assert await run.bus.subjects("HR_BLOB", "hr.blob.>") == before
    head = (await run.heads())[0]
    assert (await chain.manifest(run.bus, run.id, head.manifest_seq)).state_hash == run.hashes[0]
    await sender.shut(1.0)


async def test_a_region_that_was_cut_off_catches_up(run: WeightRun, brokers: World) -> None:
    await run.actor(WeightSender)
    await receiver(run, brokers, "eu")
    await receiver(run, brokers, "us")
    await run.train(0)
    for name in ("eu", "us"):
        await within(PATIENCE_S, run.staged(0, node=name))
    wire = brokers.regions["eu"].wire
    await wire.cut()
    try:
        for version in (1, 2):
            await run.train(version)
            await within(PATIENCE_S, run.staged(version, node="us"))
    finally:
        await wire.mend()
    staged = await within(PATIENCE_S, run.staged(2, node="eu"))
    assert snapshot.file_hash(staged.path) == run.hashes[2]
    where = EVENT.where(run=run.id, type="weights_staged")
    told = [(r.message.node, r.message.version) async for r in run.bus.history("HR_EVENT", where)]
    assert told.index(("eu", 2)) > told.index(("us", 2)), "nothing came through the cut wire"


async def test_a_region_that_joins_late_catches_up(run: WeightRun, brokers: World) -> None:
    await run.actor(WeightSender)
    for version in range(5):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    name = f"late-{run.id}"
    await brokers.join(name)
    await receiver(run, brokers, name)
    staged = await within(PATIENCE_S, run.staged(4, node=name))
    assert snapshot.file_hash(staged.path) == run.hashes[4]


async def test_a_receiver_reads_its_mirror_and_nothing_else(run: WeightRun, brokers: World) -> None:
    """With the link down, a new receiver of a region still finds the newest version that its mirror has."""
    await run.actor(WeightSender)
    await run.train(0)
    await receiver(run, brokers, "sa")
    await within(PATIENCE_S, run.staged(0, node="sa"))
    bus = await brokers.connect("weight_sync", region="sa")
    wire = brokers.regions["sa"].wire
    await wire.cut()
    try:
        head = await chain.head(bus, run.id)
        assert head is not None and head[1].state_hash == run.hashes[0]
        path = run.folder / "alone.safetensors"
        await within(PATIENCE_S, chain.obtain(bus, head[1], path, lambda version, state_hash: None, fetch=run.fetch))
        assert snapshot.file_hash(path) == run.hashes[0]
    finally:
        await wire.mend()
