"""Three real brokers with the configuration of deploy/cluster: one dies under load; what was acknowledged stays."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.bus.broker import cluster
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT, STREAMS
from tests.conftest import CONNECT_S
from tests.support.patience import PATIENCE_S
from tests.support.region_brokers import free_port

pytestmark = pytest.mark.anyio

NAMES = ("a", "b", "c")


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[dict[str, Server]]:
    folders = cluster.prepare(tmp_path, {name: f"127.0.0.1:{free_port()}" for name in NAMES})
    servers = {name: Server(folder, port=free_port(), prepared=True) for name, folder in folders.items()}
    try:
        await asyncio.gather(*(server.start() for server in servers.values()))
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers.values()))


def urls(servers: dict[str, Server]) -> str:
    return ",".join(f"nats://127.0.0.1:{server.port}" for server in servers.values())


async def leader(bus: Bus, stream: str) -> str:
    info = msgspec.json.decode(
        await bus.connection.patiently(lambda: bus.connection.api(f"STREAM.INFO.{stream}"), 60.0)
    )
    return str(info["cluster"]["leader"])


async def declared(bus: Bus) -> None:
    """Declare as soon as the brokers have found each other."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await cluster.declare_replicated(bus, reserve=False)
                return
            except BusError:
                await asyncio.sleep(0.2)  # a broker offers no event for this


@pytest.mark.slow
async def test_killing_the_leader_under_load_loses_nothing_that_was_acknowledged(brokers: dict[str, Server]) -> None:
    keys = brokers["a"].credentials
    admin = await Bus.connect(urls(brokers), role="admin", credentials=keys, timeout=CONNECT_S)
    await declared(admin)
    where = EVENT.at(run="r", actor="rollout", type="event")
    acknowledged: dict[str, int] = {}
    enough, over = asyncio.Event(), asyncio.Event()

    async def publish(name: int) -> None:
        bus = await Bus.connect(urls(brokers), role="rollout", credentials=keys, timeout=CONNECT_S)
        count = 0
        while not over.is_set():
            count += 1
            text = f"{name}-{count}"
            acknowledged[text] = await bus.publish(where, Event(actor="rollout", id="r", kind="k", text=text))
            if len(acknowledged) >= 400:
                enough.set()
        await bus.close()

    publishers = [asyncio.create_task(publish(name)) for name in range(4)]
    async with asyncio.timeout(PATIENCE_S):
        await enough.wait()
    dead = await leader(admin, "HR_EVENT")
    await brokers[dead].kill()
    before = len(acknowledged)
    enough.clear()
    async with asyncio.timeout(PATIENCE_S):
        while len(acknowledged) < before + 400:
            await asyncio.sleep(0.05)  # until the survivors have taken as much again
    assert await leader(admin, "HR_EVENT") != dead
    await brokers[dead].start()
    over.set()
    await asyncio.gather(*publishers)
    stored = {r.message.text: r.seq async for r in admin.history("HR_EVENT", where)}
    count = sum([1 async for _ in admin.history("HR_EVENT", where)])
    assert {text: stored.get(text) for text in acknowledged} == acknowledged, "acknowledged, and not there"
    assert count == len(stored), "stored twice"
    await admin.close()
    # The one that died has everything again: it alone answers with the other two as followers of a new leader.
    back = await Bus.connect(brokers[dead].url, role="admin", credentials=keys, timeout=CONNECT_S)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            info = msgspec.json.decode(
                await back.connection.patiently(lambda: back.connection.api("STREAM.INFO.HR_EVENT"), 60.0)
            )
            if len(info["cluster"]["replicas"]) == 2 and all(
                replica["current"] for replica in info["cluster"]["replicas"]
            ):
                break
            await asyncio.sleep(0.1)
    await back.close()


@pytest.mark.slow
async def test_every_stream_and_bucket_lies_on_three_disks(brokers: dict[str, Server]) -> None:
    admin = await Bus.connect(urls(brokers), role="admin", credentials=brokers["a"].credentials, timeout=CONNECT_S)
    await declared(admin)
    for stream in STREAMS:
        info = msgspec.json.decode(await admin.connection.api(f"STREAM.INFO.{stream.name}"))
        assert info["config"]["num_replicas"] == 3
        assert {info["cluster"]["leader"], *(replica["name"] for replica in info["cluster"]["replicas"])} == set(NAMES)
    await admin.close()


def test_two_brokers_are_no_cluster_and_keys_are_shared(tmp_path: Path) -> None:
    with pytest.raises(BusError, match="expected 3 brokers"):
        cluster.prepare(tmp_path, {"a": "h:1", "b": "h:2"})
    with pytest.raises(BusError, match="each as name=host:port"):
        cluster.prepare(tmp_path, {"a": "h:1", "b": "h:2", "c": "h"})
    folders = cluster.prepare(tmp_path, {"a": "h:1", "b": "h:2", "c": "h:3"})
    seeds = {(folder / "credentials" / "judge.nk").read_text() for folder in folders.values()}
    assert len(seeds) == 1
    for folder in folders.values():
        assert (folder / "self.conf").stat().st_mode & 0o077 == 0
        assert (folder / "credentials" / "judge.nk").stat().st_mode & 0o077 == 0
