"""Full snapshots from node to node, over a real broker and real HTTP: no chunk of them is in the stream."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.errors import WrongSequence
from headrace.bus.nats.kv import KeyValue
from headrace.messages.base import Message
from headrace.messages.subjects import EVENT, WEIGHT_MANIFEST
from headrace.messages.weights import HeldFile, WeightPeer, WeightTurn, peer_key, turn_key
from headrace.weights import snapshot
from headrace.weights.transfer import node
from headrace.weights.transfer.peers import Peers, is_address
from tests.conftest import Connect
from tests.support.loopback import serving
from tests.support.patience import PATIENCE_S
from tests.support.peer_double import peer
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path, full_snapshots="peer", anchor_every=3, keep=3).open()
    out.tensors = model(wide=300_000)
    yield out
    await out.close()


def settings(run: WeightRun, **weights: Any) -> None:
    """Other values of [weights] for the actors that start from now on."""
    run.config = msgspec.structs.replace(run.config, weights=msgspec.structs.replace(run.config.weights, **weights))


async def published(run: WeightRun) -> tuple[Path, HeldFile]:
    """Version 0, published by a sender that is gone: nobody serves it. The trainer's file."""
    sender = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    await within(PATIENCE_S, run.event("published"))
    await sender.shut(1.0)
    return run.path(0), HeldFile(0, run.hashes[0])


async def events(run: WeightRun, kind: str) -> list[str]:
    """The texts of a kind of events so far."""
    where = EVENT.where(run=run.id, type="event")
    return [r.message.text async for r in run.bus.history("HR_EVENT", where) if r.message.kind == kind]


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://10.0.0.3:1", True),
        ("http://node-3.cluster:65535", True),
        ("http://[fd00::1]:80", True),
        ("https://10.0.0.3:1", False),
        ("file:///etc/passwd", False),
        ("http://10.0.0.3", False),
        ("http://10.0.0.3:0", False),
        ("http://10.0.0.3:65536", False),
        ("http://10.0.0.3:1/", False),
        ("http://10.0.0.3:1/admin?", False),
        ("http://user@10.0.0.3:1", False),
        ("http://10.0.0.3:1#", False),
        ("http://10.0.0.3:1@169.254.169.254:80", False),
        ("http://169.254.169.254:80", False),
        ("http://2852039166:80", False),
        ("http://0xa9.0xfe.0xa9.0xfe:80", False),
        ("http://[fe80::1]:80", False),
        ("http://[::ffff:169.254.169.254]:80", False),
        ("http://0.0.0.0:80", False),
        ("http://224.0.0.1:80", False),
        ("http://10.0.0.3:1\r\nHost: x:80", False),
        ("http://\uff11\uff10.0.0.3:1", False),
        ("", False),
    ],
)
def test_an_entry_names_a_host_and_a_port_and_nothing_else(url: str, asked: bool) -> None:
    assert is_address(url) == asked


async def test_a_redirect_of_a_peer_is_not_followed(run: WeightRun) -> None:
    file, held = await published(run)
    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.headers.get("Authorization", ""))
        return web.Response(body=file.read_bytes())

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"{request.scheme}://{request.host}/elsewhere")

    app = web.Application()
    app.router.add_get("/weights/{rest:.*}", redirect)
    app.router.add_get("/elsewhere", elsewhere)
    async with serving(app) as url:
        entry = WeightPeer(run=run.id, node="liar", region=run.config.weights.region, url=url, files=(held,))
        await (await (await run.connect("weight_sync")).kv("HR_NODES")).put(peer_key(run.id, "liar", "receiver"), entry)
        await run.actor(WeightReceiver)
        assert "answers 302" in await within(PATIENCE_S, run.event("source_failed"))
    assert reached == []


async def test_the_second_receiver_fetches_from_the_first(run: WeightRun) -> None:
    sender = await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    for version in range(5):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))
    full = {}
    for version in range(5):
        where = WEIGHT_MANIFEST.at(run=run.id, version=version)
        async for received in run.bus.history("HR_WEIGHTS", where):
            if received.message.base_version < 0:
                full[version] = received.message
    assert sorted(full) == [0, 3]
    assert all(manifest.detached and not manifest.chunks for manifest in full.values())
    assert all(manifest.wire_bytes == manifest.raw_bytes > 38_000_000 for manifest in full.values())
    await sender.shut(1.0)
    late = await run.actor(WeightReceiver, node="n2")
    staged = await within(PATIENCE_S, run.staged(4, node="n2"))
    assert snapshot.file_hash(staged.path) == run.hashes[4]
    assert late.store.versions() == [3, 4], "it serves the full snapshot in its turn"
    assert await events(run, "source_failed") == []


async def test_a_peer_that_dies_half_way_costs_its_pieces_only(run: WeightRun, connect: Connect) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    async with (
        peer(bus, run.id, path, held, node="dying") as dying,
        peer(bus, run.id, path, held, node="far", region="elsewhere") as far,
    ):
        dying.dies_after = 1
        await run.actor(WeightReceiver)
        staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert len(dying.served) == 1 and not set(dying.served) & set(far.served)
    assert "node dying sent less" in (await events(run, "source_failed"))[0]


@pytest.mark.parametrize("left", [20_000_000, 100, 4, 0])
async def test_a_truncated_file_costs_its_pieces_only(run: WeightRun, connect: Connect, left: int) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    async with (
        peer(bus, run.id, path, held, node="short") as short,
        peer(bus, run.id, path, held, node="far", region="elsewhere"),
    ):
        short.data = short.data[:left].ljust(8 if left == 4 else left, b"\0")
        await run.actor(WeightReceiver)
        staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert "node short" in (await events(run, "source_failed"))[0]


async def test_a_lying_byte_is_found_and_its_block_is_fetched_elsewhere(run: WeightRun, connect: Connect) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    async with (
        peer(bus, run.id, path, held, node="liar") as liar,
        peer(bus, run.id, path, held, node="far", region="elsewhere") as far,
    ):
        liar.wrong = {len(liar.data) - 1}
        await run.actor(WeightReceiver)
        staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert "node liar sent other bytes than version 0 has in block" in (await events(run, "source_failed"))[0]
    assert sum(end - start for start, end in far.served) < len(far.data) / 2, "what was right stays"


async def test_without_the_secret_nothing_is_served(run: WeightRun, connect: Connect, tmp_path: Path) -> None:
    import aiohttp

    await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.event("published"))
    bus = await connect("weight_sync")
    (entry,) = (await (await bus.kv("HR_NODES")).items(peer_key(run.id, "*", "*"))).values()
    assert isinstance(entry[0], WeightPeer)
    url = f"{entry[0].url}/weights/0/{run.hashes[0]}"
    async with aiohttp.ClientSession() as session:
        assert run.bus.credentials is not None
        another = node.secret(run.bus.credentials, "another-run")
        folder = run.bus.credentials if run.bus.credentials.is_dir() else run.bus.credentials.parent
        shared = (folder / node.SECRET_FILE).read_text().strip()
        for token in ("", "a" * 64, another, shared):
            for place in (url, entry[0].url, f"{entry[0].url}/none"):
                async with session.get(place, headers={"Authorization": f"Bearer {token}"} if token else {}) as answer:
                    assert answer.status == 401 and len(await answer.read()) < 100
    other = tmp_path / "credentials"
    shutil.copytree(run.bus.credentials or "", other)
    (other / "weight_peers.key").write_text("b" * 64)
    await run.actor(WeightReceiver, bus=await connect("weight_sync", node="n2", credentials=other))
    assert "refuses this node's secret" in await within(PATIENCE_S, run.event("source_failed"))
    assert "nobody has" in await within(PATIENCE_S, run.event("no_full_snapshot"))


async def test_when_nobody_has_it_an_event_says_so_and_the_fetch_goes_on_later(
    run: WeightRun, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.weight_receiver.AGAIN_S", 0.1)
    path, held = await published(run)
    bus = await connect("weight_sync")
    first = await run.actor(WeightReceiver)
    assert "nobody has 38" in await within(PATIENCE_S, run.event("no_full_snapshot"))
    async with peer(bus, run.id, path, held, node="dying") as dying:
        dying.dies_after = 1
        await within(PATIENCE_S, run.event("source_failed"))
    await first.shut(1.0)
    (piece,) = dying.served
    async with peer(bus, run.id, path, held, node="whole") as whole:
        await run.actor(WeightReceiver)  # a restart goes on with the blocks that are there
        staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert sum(end - start for start, end in [piece, *whole.served]) == len(whole.data) - whole.head
    assert [p.name for p in Path(staged.path).parent.iterdir()] == ["0.safetensors"]


async def test_a_region_has_few_turns_at_the_far_link(run: WeightRun, connect: Connect) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    settings(run, region="eu", peer_turns=1)
    async with peer(bus, run.id, path, held, node="far", region="us") as far:
        far.gate = asyncio.Event()
        for node in ("n1", "n2", "n3"):
            await run.actor(WeightReceiver, node=node)
        await within(PATIENCE_S, far.begun.wait())
        far.gate.set()
        for node in ("n1", "n2", "n3"):
            staged = await within(PATIENCE_S, run.staged(0, node=node))
            assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert sum(end - start for start, end in far.served) == len(far.data) - far.head, "it left once"
    assert len(far.served) == len(set(far.served))


async def test_a_node_names_its_file_before_it_gives_its_turn_back(run: WeightRun, connect: Connect) -> None:
    """Otherwise the next node takes the turn, sees no holder in its region and reads from afar, too."""
    path, held = await published(run)
    settings(run, region="eu", peer_turns=1)
    async with peer(await connect("weight_sync"), run.id, path, held, node="far", region="us"):
        receiver = await run.actor(WeightReceiver)
        await within(PATIENCE_S, run.staged(0))
        keys = peer_key(run.id, receiver.bus.node, "receiver"), turn_key(run.id, "eu", 0)
        named, given = [await (await run.bus.kv("HR_NODES"))._last(key) for key in keys]
    assert named is not None and given is not None and named.seq < given.seq, "the turn is removed later"


class OtherWasFaster(KeyValue):
    """HR_NODES, in which another node of the region names its file right before a turn is taken."""

    faster: tuple[str, WeightPeer]

    async def create(self, key: str, message: Message) -> int:
        """As `KeyValue`."""
        await self.put(*self.faster)
        return await super().create(key, message)


async def test_a_node_with_a_turn_looks_once_more_in_its_region(run: WeightRun, connect: Connect) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    values = OtherWasFaster(bus, "HR_NODES")
    near = WeightPeer(run=run.id, node="near", region="eu", url="http://127.0.0.1:1", files=(held,))
    values.faster = peer_key(run.id, "near", "receiver"), near
    async with peer(bus, run.id, path, held, node="far", region="us"):
        peers = Peers(values, WrongSequence, run=run.id, node="n1", region="eu", token="secret", turns=1)
        async with peers.anywhere([held]) as sources:
            assert [source.name for source in sources] == ["node near"]
            assert await values.get(turn_key(run.id, "eu", 0)) is not None, "it took the turn"
    assert await values.get(turn_key(run.id, "eu", 0)) is None


async def test_a_turn_of_a_dead_node_is_taken_over(
    run: WeightRun, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.weights.transfer.peers.STALE_S", 0.5)
    path, held = await published(run)
    bus = await connect("weight_sync")
    settings(run, region="eu", peer_turns=1)
    values = await bus.kv("HR_NODES")
    await values.put(turn_key(run.id, "eu", 0), WeightTurn(node="dead", holder="dead"))
    async with peer(bus, run.id, path, held, node="far", region="us"):
        await run.actor(WeightReceiver)
        await within(PATIENCE_S, run.staged(0))
    assert await values.get(turn_key(run.id, "eu", 0)) is None, "it is given back"


async def test_a_sender_that_lost_its_files_gets_them_from_a_receiver(run: WeightRun) -> None:
    first = await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    for version in (0, 1):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))
    await first.shut(1.0)
    shutil.rmtree(first.store.folder)
    await run.actor(WeightSender)
    await run.train(2)
    staged = await within(PATIENCE_S, run.staged(2))
    assert snapshot.file_hash(staged.path) == run.hashes[2]
    assert [head.full_version for head in await run.heads()] == [0, 0, 0], "the chain goes on"


async def test_a_full_snapshot_that_is_lost_everywhere_is_an_error_and_the_next_one_heals(run: WeightRun) -> None:
    await published(run)
    shutil.rmtree(run.folder / run.id / "nodes")
    await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    await run.train(1)
    staged = await within(PATIENCE_S, run.staged(1))
    assert snapshot.file_hash(staged.path) == run.hashes[1]
    assert "publishing version 1 as a full snapshot" in await within(PATIENCE_S, run.event("base_lost"))
    assert (await run.heads())[-1].full_version == 1
