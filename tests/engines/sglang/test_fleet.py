"""Several servers behind one engine: sessions stay, a version is on all or on none, each has its devices."""

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.rollout.server import ServerReports
from headrace.config import Config, Production
from headrace.config import Engine as Section
from headrace.engines.base import Engine, EngineError, ServerEngine
from headrace.engines.server import engine as one_server
from headrace.engines.server.fleet import Fleet
from headrace.engines.server.options import ServerOptions
from headrace.engines.server.process import Server
from headrace.engines.server.requirements import problems
from headrace.engines.server.weights import checksums
from headrace.engines.sglang.backend import digest
from headrace.messages.rollout import PolicyRef, Span
from tests.engines.sglang.test_server import interpreter
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.patience import PATIENCE_S
from tests.support.sglang.double import Double
from tests.support.sglang.opening import opened, sglang_engine

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
            engines.append(sglang_engine(CONFIG, tmp_path / f"stage{index}", url=double.url, start_s=20.0))
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


async def back(fleet: Fleet) -> None:
    """Until all servers serve the node's version."""
    async with asyncio.timeout(PATIENCE_S):
        while fleet.stats()["out"]:
            await asyncio.sleep(0.01)


async def running(double: Double, count: int) -> None:
    """Until a server computes so many requests."""
    await double.until(lambda: len(double.running) == count)


def asked_of(double: Double) -> set[tuple[int, ...]]:
    """The contexts that a server was asked for."""
    return {tuple(body["input_ids"]) for body in double.bodies("/generate")}


@pytest.mark.anyio
async def test_a_dead_server_gets_no_session_until_it_serves_the_nodes_version_again(
    pair: tuple[Fleet, list[Double]], versions: Versions
) -> None:
    """Before, its failed sessions were closed at once, so it had the fewest and got almost every new one, and the node
    stayed on its version."""
    fleet, doubles = pair
    events: list[str] = []

    async def event(kind: str, text: str, level: str) -> None:
        events.append(kind)

    async def metric(**values: float) -> None:
        assert values["server_servers"] == 2

    alone = Config(production=Production(enabled=False))
    reports = ServerReports(alone, None, "r", event, metric)  # type: ignore[arg-type]
    await reports.publish(fleet)
    first = [await fleet.sample(request(f"s{index}", ids=(1, 2, index))) for index in range(4)]
    await doubles[0].let_go(hold_at=2)
    works = [asyncio.create_task(fleet.sample(request(f"r{index}", ids=(5, 6, index)))) for index in range(4)]
    await asyncio.gather(*(running(double, 2) for double in doubles))
    await doubles[1].die()
    await doubles[0].let_go()
    moved = await asyncio.gather(*works)
    assert all(len(sample.ids) == 8 and sample.spans == (Span(0, 10, 0),) for sample in moved)
    assert asked_of(doubles[0]) >= {(5, 6, index) for index in range(4)}
    # Its sessions go on elsewhere: their context is forwarded again, and the spans and routes say so.
    for index, before in enumerate(first):
        stayed = (1, 2, index) in asked_of(doubles[0])
        again = await fleet.sample(request(f"s{index}", ids=(1, 2, index, *before.ids, 9)))
        assert again.spans == ((Span(10, 19, 0),) if stayed else (Span(0, 19, 0),))
    pauses = len(doubles[0].bodies("/pause_generation"))
    swap = await fleet.load(1, *versions.files[1])
    assert (swap.version, fleet.version) == (1, 1) and len(doubles[0].bodies("/pause_generation")) == pauses + 1
    sample = await fleet.sample(request("new"))
    assert {span.version for span in sample.spans} == {1}
    stats = fleet.stats()
    assert (stats["out"], stats["losses"], stats["returns"]) == (1, 1, 0)
    await reports.publish(fleet)
    assert events == ["server_lost"]
    await doubles[1].start()
    await back(fleet)
    assert doubles[1].version == f"1-{versions.files[1][1][:16]}"
    await fleet.sample(request("newer", ids=(7, 7, 7)))
    assert (7, 7, 7) in asked_of(doubles[1]), "it has the fewest sessions"
    stats = fleet.stats()
    assert (stats["out"], stats["losses"], stats["returns"]) == (0, 1, 1)
    await reports.publish(fleet)
    assert events == ["server_lost", "server_returned"]


@pytest.mark.anyio
async def test_the_servers_of_a_node_share_the_expected_checksums(
    pair: tuple[Fleet, list[Double]], versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each server fused and hashed the whole version by itself, at the same time as the others."""
    fleet, doubles = pair
    expected, computed = checksums.expected, []

    def counted(path: Path, *shape: Any) -> dict[str, str]:
        computed.append(path)
        return expected(path, *shape)

    monkeypatch.setattr(checksums, "expected", counted)
    await versions.load(fleet, 1)
    assert len(computed) == 1 and fleet.stats()["checked"]
    doubles[1].fail_updates = ["half"]
    with pytest.raises(EngineError, match="was refused"):
        await versions.load(fleet, 2)
    assert len(computed) == 2 and fleet.stats()["checked"], "the version before is known"


@pytest.mark.anyio
async def test_expected_checksums_of_a_caller_that_left_are_computed_again(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change its file then."""
    shared, expected, started, go_on = checksums.Expectations(), checksums.expected, asyncio.Event(), threading.Event()
    loop, paths = asyncio.get_running_loop(), [Path(path) for path, _ in versions.files[:2]]

    def held(path: Path, *shape: Any) -> dict[str, str]:
        if path == paths[0]:
            loop.call_soon_threadsafe(started.set)
            go_on.wait(PATIENCE_S)
        return expected(path, *shape)

    monkeypatch.setattr(checksums, "expected", held)
    first, second = [
        asyncio.create_task(shared.of(path, "same", CONFIG, "float32", digest, checksums.ONE, "cpu"))
        for path in (paths[0], paths[1])
    ]
    await started.wait()
    first.cancel()
    assert await second == expected(paths[1], CONFIG, "float32", digest)
    go_on.set()
    assert await shared.of(paths[0], "same", CONFIG, "float32", digest, checksums.ONE, "cpu") == await second


@pytest.mark.anyio
async def test_turns_wait_for_a_server_when_all_are_dead(pair: tuple[Fleet, list[Double]], versions: Versions) -> None:
    fleet, doubles = pair
    await doubles[1].die()
    await versions.load(fleet, 1)
    await doubles[0].die()
    works = [asyncio.create_task(fleet.sample(request(f"s{index}"))) for index in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while fleet.stats()["losses"] < 2:
            await asyncio.sleep(0.01)
    await doubles[0].start()
    samples = await asyncio.gather(*works)
    assert {span.version for sample in samples for span in sample.spans} == {1}
    await doubles[1].start()
    await back(fleet)
    assert [double.version for double in doubles] == [f"1-{versions.files[1][1][:16]}"] * 2


@pytest.mark.anyio
async def test_a_first_version_is_served_without_the_server_that_does_not_start(
    versions: Versions, tmp_path: Path
) -> None:
    doubles = [Double(CONFIG), Double(CONFIG)]
    for double in doubles:
        await double.start()
    await doubles[0].die()
    engines = [sglang_engine(CONFIG, tmp_path / f"s{i}", url=d.url, start_s=0.5) for i, d in enumerate(doubles)]
    fleet = Fleet(engines)
    await versions.load(fleet, 0)
    assert fleet.version == 0 and fleet.stats()["out"] == 1 and fleet.fingerprint == engines[1].fingerprint != ""
    samples = await asyncio.gather(*(fleet.sample(request(f"s{index}")) for index in range(2)))
    assert all(sample.spans == (Span(0, 10, 0),) for sample in samples) and not doubles[0].bodies("/generate")
    await doubles[0].start()
    await back(fleet)
    await doubles[0].die()
    await doubles[1].die()
    with pytest.raises(EngineError, match="cannot be reached"):
        await versions.load(fleet, 1)
    assert fleet.version == 0
    await fleet.stop()


@pytest.mark.anyio
async def test_a_fleet_that_is_stopped_brings_no_server_back(
    pair: tuple[Fleet, list[Double]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_server, "GRACE_S", 0.3)
    fleet, doubles = pair
    await doubles[0].let_go(hold_at=1)
    await doubles[1].let_go(hold_at=1)
    works = [asyncio.create_task(fleet.sample(request(f"s{index}", ids=(1, index)))) for index in range(2)]
    await asyncio.gather(*(running(double, 1) for double in doubles))
    await doubles[0].die()
    async with asyncio.timeout(PATIENCE_S):
        while not fleet.stats()["out"]:
            await asyncio.sleep(0.01)
    doubles[1].silent = {"/abort_request"}
    await fleet.stop()
    await doubles[1].die()
    assert all(isinstance(end, Exception) for end in await asyncio.gather(*works, return_exceptions=True))
    assert not [task.get_name() for task in asyncio.all_tasks() if "brought back" in task.get_name()]


@pytest.mark.anyio
async def test_the_requests_of_other_clients_are_those_of_all_servers(pair: tuple[Fleet, list[Double]]) -> None:
    fleet, doubles = pair
    counts = await fleet.outside()
    assert counts is not None and counts.running == counts.queued == 0
    assert fleet.engines[1]._life.terms is not None
    doubles[1].info = {"enable_priority_scheduling": False}
    fleet.engines[1]._life.lost()
    await back(fleet)
    assert await fleet.outside() is None


def test_each_server_has_its_devices_its_port_and_its_share_of_the_batch(tmp_path: Path) -> None:
    options = {"python": "p", "servers": 2, "server_devices": ["0,1", "2,3"]}
    fleet = opened(CONFIG, tmp_path, max_batch=65, **options)  # type: ignore[arg-type]
    assert isinstance(fleet, Fleet)
    servers = [engine._server for engine in fleet.engines]
    assert all(server is not None for server in servers)
    ports = {server.port for server in servers if server is not None}
    assert len(ports) == 2 and [server._devices for server in servers if server is not None] == ["0,1", "2,3"]
    commands = [engine._backend.command(tmp_path, "0-a", 1).arguments for engine in fleet.engines]
    assert [words[words.index("--max-running-requests") + 1] for words in commands] == ["33", "33"]
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
    section = Section(kind="sglang", exact=False)
    ((named, text),) = problems(section, ServerOptions(**keys))  # type: ignore[arg-type]
    assert named == f"options.{key}" and words in text
    cpu = ServerOptions(python="p", servers=2, args=("--device", "cpu"))
    assert not list(problems(section, cpu))


@pytest.mark.anyio
async def test_a_port_is_kept_for_a_server_until_it_is_given_up(tmp_path: Path) -> None:
    server = Server("p", tmp_path / "log")
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
    fleet = opened(
        CONFIG, tmp_path, max_batch=8, python=python, servers=2, server_devices=["0", "1"],
        args=["--device", "cpu"], weights="tensor",
    )  # fmt: skip
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
        async with asyncio.timeout(PATIENCE_S):
            while fleet.stats()["starts"] < 3:
                await asyncio.sleep(0.01)
        await back(fleet)
        assert fleet.stats()["starts"] == 3 and fleet.engines[1].has(1, versions.files[1][1])
    finally:
        await fleet.stop()
