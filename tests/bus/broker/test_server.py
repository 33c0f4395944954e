"""The embedded broker: it dies with its parent, and its error says in one sentence why it does not run."""

import asyncio
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.bus.broker.server import Server, open_store, running
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats import streams
from headrace.bus.nats.streams import declare
from headrace.config import parse
from headrace.config.nodes import StreamGib
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.training import StepFailed
from tests.support import records
from tests.support.keys import as_writers
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def event(text: str) -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


async def admin(server: Server) -> Bus:
    return await as_writers(server.url, server.credentials)


async def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BusError, match=rf"^port {port} on 127.0.0.1 is taken"):
            await Server(tmp_path, port=port).start()


async def test_a_second_broker_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Server(tmp_path) as first:
        assert running(tmp_path) is not None
        with pytest.raises(BusError, match=rf"^a broker \(process {first.pid}\) already runs"):
            await Server(tmp_path).start()
    assert running(tmp_path) is None


async def test_a_refused_folder_a_small_disk_and_a_bad_file_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BusError, match=r"cannot be used: Not a directory"):
        await Server(tmp_path / "file" / "x").start()
    with pytest.raises(BusError, match=r"too small: \d+ MiB free, the streams need"):
        await Server(tmp_path / "small", need_free=1 << 60).start()
    conf = tmp_path / "bad.conf"
    conf.write_text('max_payload: "much"\n')
    monkeypatch.setattr("headrace.bus.broker.server.CONF", conf)
    with pytest.raises(BusError, match=r"^nats-server ended with code 1: .*nats.conf:1"):
        await Server(tmp_path / "bad").start()


async def test_secrets_are_private_and_last_for_the_run(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        files = list(server.credentials.iterdir())
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert stat.S_IMODE(server.credentials.stat().st_mode) == 0o700
        seed = (server.credentials / "judge.nk").read_text()
        assert seed.strip() not in (server.credentials / "users.conf").read_text()
    async with Server(tmp_path) as server:
        assert (server.credentials / "judge.nk").read_text() == seed


CHILD = """
import asyncio, sys
from headrace.bus.broker.server import Server
async def main():
    server = await Server(sys.argv[1]).start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_it_never_outlives_its_parent(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    pid = int(await asyncio.wait_for(child.stdout.readline(), PATIENCE_S))
    handle = os.pidfd_open(pid)
    child.send_signal(signal.SIGKILL)
    await child.wait()
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, gone.set)  # readable once the process has ended
    try:
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    assert running(tmp_path) is None


async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    bus = await admin(server)
    await declare(bus)
    port, run = server.port, f"r{token_hex(4)}"
    where = s.EVENT.at(run=run, actor="admin", type="event")
    acknowledged: dict[int, str] = {}
    enough = asyncio.Event()

    async def publisher(name: int) -> None:
        for n in range(150):
            text = f"{name}-{n}"
            acknowledged[await bus.publish(where, event(text), msg_id=f"{run}-{text}")] = text
            if len(acknowledged) == 300:
                enough.set()

    tasks = [asyncio.create_task(publisher(name)) for name in range(8)]
    await enough.wait()
    await server.kill()
    again = await Server(tmp_path, port=port).start()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    stored = {received.seq: received.message.text async for received in bus.history("HR_EVENT", where)}
    assert len(acknowledged) == 8 * 150, "the publishers went on by themselves"
    assert stored == acknowledged, "nothing lost, nothing twice"
    await bus.close()
    await again.stop()


async def test_open_store_reads_a_finished_run(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        bus = await admin(server)
        await declare(bus)
        where = s.EVENT.at(run="r1", actor="trainer", type="event")
        seq = await bus.publish(where, event("x"))
        await bus.close()
    async with await open_store(tmp_path) as server:
        bus = await Bus.connect(server.url, role="operator", credentials=server.credentials)
        assert [r.seq async for r in bus.history("HR_EVENT", where)] == [seq]
        await bus.close()
    with pytest.raises(BusError, match="holds no streams"):
        await open_store(tmp_path / "nothing")


async def test_a_full_disk_is_a_sentence_and_keeps_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small.conf"
    conf = (ROOT / "nats.conf").read_text()
    small.write_text(conf.replace("jetstream {", "jetstream {\n  max_file_store: 4MB"))
    monkeypatch.setattr("headrace.bus.storing.RETRY_S", 0.1)
    monkeypatch.setattr("headrace.bus.broker.server.CONF", small)
    async with Server(tmp_path / "s") as server:
        bus = await admin(server)
        await declare(bus)
        where, stored = s.STEP.at(run="r1"), []

        def failed(detail: str) -> StepFailed:
            return msgspec.structs.replace(records.step_failed(0, (), 0, run="r1"), detail=detail)

        with pytest.raises(BusError, match=r"^hr.step.r1 could not be stored within 0.1 s: the broker's disk is full"):
            while True:
                stored.append(await bus.publish(where, failed(os.urandom(200_000).hex())))
        assert stored and [r.seq async for r in bus.history("HR_STEP", where)] == stored
        await bus.purge("HR_STEP", before=stored[-1])
        assert await bus.publish(where, failed("there is space again")) > stored[-1]
        await bus.close()


async def test_declaring_again_updates_and_reserving_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small.conf"
    conf = (ROOT / "nats.conf").read_text()
    small.write_text(conf.replace("jetstream {", "jetstream {\n  max_file_store: 1GB"))
    monkeypatch.setattr("headrace.bus.broker.server.CONF", small)
    async with Server(tmp_path / "s") as server:
        bus = await admin(server)
        await declare(bus)
        await declare(bus)
        before = await bus.connection.api("STREAM.INFO.HR_EVENT")
        shorter = tuple(
            s.Stream(name=stream.name, subjects=stream.subjects, discard="old", max_age_s=600.0)
            if stream.name == "HR_EVENT"
            else stream
            for stream in s.STREAMS
        )
        monkeypatch.setattr("headrace.bus.nats.streams.STREAMS", shorter)
        await declare(bus)
        after = await bus.connection.api("STREAM.INFO.HR_EVENT")
        assert b'"max_age":1209600000000000' in before and b'"max_age":600000000000' in after
        with pytest.raises(BusError, match=r"^the broker's disk is too small: HR_\w+ asks for"):
            await declare(bus, reserve=True)
        await bus.close()


async def test_every_stream_has_a_size_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = tuple(msgspec.structs.replace(stream, max_bytes=stream.max_bytes >> 10) for stream in s.STREAMS)
    monkeypatch.setattr("headrace.bus.nats.streams.STREAMS", smaller)
    async with Server(tmp_path) as server:
        async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as bus:
            await declare(bus, reserve=True)
            for stream in smaller:
                answer = msgspec.json.decode(await bus.connection.api(f"STREAM.INFO.{stream.name}"))
                assert answer["config"]["max_bytes"] == stream.max_bytes > 0, stream.name


async def test_a_declaration_keeps_the_limit_that_an_operator_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = tuple(msgspec.structs.replace(stream, max_bytes=stream.max_bytes >> 10) for stream in s.STREAMS)
    monkeypatch.setattr("headrace.bus.nats.streams.STREAMS", smaller)
    async with Server(tmp_path) as server:
        async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as bus:

            async def limit(name: str) -> int:
                return (await streams.size_of(bus.connection, name)).limit

            await declare(bus, sizes={"HR_DLQ": 5 << 10})
            assert (await limit("HR_DLQ"), await limit("HR_STEP")) == (5 << 10, 0)
            large = 3 << 20
            info = msgspec.json.decode(await bus.connection.api("STREAM.INFO.HR_STEP"))
            await bus.connection.api("STREAM.UPDATE.HR_STEP", info["config"] | {"max_bytes": large})
            await declare(bus)
            assert (await limit("HR_DLQ"), await limit("HR_STEP")) == (5 << 10, large)
            await declare(bus, reserve=True)
            assert await limit("HR_STEP") == large, "larger than planned"
            assert await limit("HR_DLQ") == 1 << 20, "smaller than planned: it is reserved"
            await declare(bus, sizes={"HR_STEP": 7 << 20})
            assert await limit("HR_STEP") == 7 << 20, "the configuration names it"
            await bus.publish(s.STEP.at(run="r1"), records.step_failed(0, (), 0, run="r1"))
            with pytest.raises(BusError, match=r"HR_STEP holds 0 MiB, more than the 0 MiB of \[bus\.stream_gib\]"):
                await declare(bus, sizes={"HR_STEP": 1})


def test_every_stream_has_a_key_for_its_limit() -> None:
    keys = {f"HR_{name.upper()}": name for name in msgspec.structs.asdict(StreamGib())}
    assert list(keys) == [stream.name for stream in s.STREAMS]
    assert parse("[bus.stream_gib]\nweights = 0.5\n").bus.stream_bytes == {"HR_WEIGHTS": 1 << 29}
