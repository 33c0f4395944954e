"""Several servers behind one engine: sessions stay, a version is on all or on none, each has its devices."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.config import Engine as Section
from headrace.engines.base import Engine, EngineError, ServerEngine
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.fleet import Fleet
from headrace.engines.sglang.open import opened
from headrace.engines.sglang.requirements import problems
from headrace.engines.sglang.server import Server
from headrace.messages.rollout import PolicyRef
from tests.engines.sglang.test_server import interpreter
from tests.support import tiny
from tests.support.engines import Versions
from tests.support.sglang.double import Double
from tests.support.sglang.requests import request

CONFIG = tiny.config()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(CONFIG, tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture
async def pair(versions: Versions, tmp_path: Path) -> AsyncIterator[tuple[Fleet, list[Double]]]:
    """Two servers with version 0."""
    doubles = [Double(CONFIG), Double(CONFIG)]
    async with AsyncExitStack() as stack:
        engines = []
        for index, double in enumerate(doubles):
            await double.start()
            stack.push_async_callback(double.close)
            engines.append(SglangEngine(CONFIG, tmp_path / f"stage{index}", url=double.url, start_s=20.0))
        fleet = Fleet(engines)
        stack.push_async_callback(fleet.stop)
        await versions.load(fleet, 0)
        yield fleet, doubles


@pytest.mark.anyio
async def test_a_session_stays_on_its_server_and_new_ones_are_spread(pair: tuple[Fleet, list[Double]]) -> None:
    fleet, doubles = pair
    engine: Engine = fleet
    assert isinstance(fleet, ServerEngine) and engine.version == 0 and engine.fingerprint.startswith("sglang-")
    for turn in range(2):
        await asyncio.gather(*(engine.sample(request(f"s{index}", ids=(1, 2, index))) for index in range(4)))
        assert [len(double.bodies("/generate")) for double in doubles] == [2 * (turn + 1)] * 2
    asked = [{tuple(body["input_ids"][:3]) for body in double.bodies("/generate")} for double in doubles]
    assert not asked[0] & asked[1], "a session's turns are on one server"
    await engine.close("s0")
    await engine.close("nobody")
    await engine.sample(request("s4", ids=(9, 9, 9)))
    home = next(index for index, part in enumerate(asked) if (1, 2, 0) in part)
    assert (9, 9, 9) in {tuple(body["input_ids"]) for body in doubles[home].bodies("/generate")}, "the freed place"
    stats = fleet.stats()
    assert stats["servers"] == 2 and stats["sampled"] == 9 * 8 and stats["checked"] == 1
    assert await fleet.health() == "serving"
    await doubles[1].die()
    assert await fleet.health() == "down"
    await doubles[1].start()


@pytest.mark.anyio
async def test_a_version_that_one_server_refuses_is_on_no_server(
    pair: tuple[Fleet, list[Double]], versions: Versions
) -> None:
    fleet, doubles = pair
    swap = await fleet.load(1, *versions.files[1])
    assert (swap.version, fleet.version) == (1, 1) and swap.pause_ms == fleet.stats()["pause_ms"] > 0
    doubles[1].fail_updates = ["half"]
    with pytest.raises(EngineError, match="version 2 was refused"):
        await versions.load(fleet, 2)
    label = f"1-{versions.files[1][1][:16]}"
    assert fleet.version == 1 and [double.version for double in doubles] == [label] * 2
    for index in range(2):
        sample = await fleet.sample(request(f"s{index}"))
        assert {span.version for span in sample.spans} == {1}
    await versions.load(fleet, 2)
    assert fleet.version == 2
    await fleet.pin(0, *versions.files[0])
    pinned = await fleet.sample(request("p", policy=PolicyRef(kind="pinned", version=0)))
    assert {span.version for span in pinned.spans} == {0}
    await fleet.unpin(0)
    with pytest.raises(EngineError, match="not pinned"):
        await fleet.sample(request("p", policy=PolicyRef(kind="pinned", version=0)))


@pytest.mark.anyio
async def test_the_requests_of_other_clients_are_those_of_all_servers(pair: tuple[Fleet, list[Double]]) -> None:
    fleet, doubles = pair
    counts = await fleet.outside()
    assert counts is not None and counts.running == counts.queued == 0
    assert fleet.engines[1]._life.terms is not None
    doubles[1].info = {"enable_priority_scheduling": False}
    fleet.engines[1]._life.lost()
    await fleet.engines[1].sample(request())
    assert await fleet.outside() is None


def test_each_server_has_its_devices_its_port_and_its_share_of_the_batch(tmp_path: Path) -> None:
    section = Section(
        kind="sglang", exact=False, python="p", stage_dir=str(tmp_path), servers=2, server_devices=("0,1", "2,3"),
        max_batch=65,
    )  # fmt: skip
    fleet = opened(section, CONFIG, tmp_path, "r")
    assert isinstance(fleet, Fleet)
    servers = [engine._server for engine in fleet.engines]
    assert all(server is not None for server in servers)
    ports = {server.port for server in servers if server is not None}
    assert len(ports) == 2 and [server._devices for server in servers if server is not None] == ["0,1", "2,3"]
    assert [server.args[3] for server in servers if server is not None] == ["33", "33"]
    assert len({str(engine._stage.folder) for engine in fleet.engines}) == 2


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"url": "http://x", "servers": 2}, "servers", "for servers that are started"),
        ({"url": "http://x", "server_devices": ("0",)}, "servers", "for servers that are started"),
        ({"python": "p", "servers": 3, "server_devices": ("0", "1")}, "server_devices", "each of 3 servers, got 2"),
        ({"python": "p", "servers": 2}, "server_devices", "the GPUs of each of 2 servers"),
        ({"python": "p", "servers": 2, "server_devices": ("0,1", "1,2")}, "server_devices", "got 1 more than once"),
    ],
)
def test_devices_that_contradict_each_other_are_refused(keys: dict[str, object], key: str, words: str) -> None:
    ((named, text),) = problems(Section(kind="sglang", exact=False, **keys))  # type: ignore[arg-type]
    assert named == key and words in text
    cpu = Section(kind="sglang", exact=False, python="p", servers=2, args=("--device", "cpu"))
    assert not list(problems(cpu))


@pytest.mark.anyio
async def test_a_port_is_kept_for_a_server_until_it_is_given_up(tmp_path: Path) -> None:
    server = Server("p", [], tmp_path / "log")
    for reuse in (0, 1):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            if not reuse:
                with pytest.raises(OSError, match="in use") as caught:
                    other.bind(("127.0.0.1", server.port))
                assert caught.value.errno == errno.EADDRINUSE
    for _ in range(2):  # the server binds it, also after a restart
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", server.port)
        listener.close()
        await listener.wait_closed()
    port = server.port
    del server
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.anyio
@pytest.mark.slow
async def test_two_servers_are_started_and_see_their_own_devices(versions: Versions, tmp_path: Path) -> None:
    python = interpreter(tmp_path, f"{sys.executable} -m tests.support.sglang.double_process")
    section = Section(
        kind="sglang", exact=False, python=python, stage_dir=str(tmp_path), servers=2, server_devices=("0", "1"),
        args=("--device", "cpu"), max_batch=8, weights="tensor",
    )  # fmt: skip
    fleet = opened(section, CONFIG, tmp_path, "r")
    assert isinstance(fleet, Fleet)
    try:
        await versions.load(fleet, 0)
        pids = [engine._server.process.pid for engine in fleet.engines if engine._server and engine._server.process]
        seen = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        assert [b"CUDA_VISIBLE_DEVICES=" + str(index).encode() in seen[index] for index in range(2)] == [True, True]
        await versions.load(fleet, 1)
        assert fleet.stats()["tensor_bytes"] > 0 and fleet.stats()["checked"]
        os.killpg(pids[1], signal.SIGKILL)
        samples = await asyncio.gather(*(fleet.sample(request(f"s{index}")) for index in range(4)))
        assert {span.version for sample in samples for span in sample.spans} == {1}
        assert fleet.stats()["starts"] == 3
    finally:
        await fleet.stop()
