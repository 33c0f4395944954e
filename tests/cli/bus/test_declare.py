"""A broker without streams: actors say what is missing, `headrace bus declare` creates it, twice without harm."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.bus.broker import permissions
from headrace.bus.broker.credentials import write_accounts
from headrace.bus.broker.server import CONF, Server
from headrace.bus.connection import Bus
from headrace.bus.errors import StreamMissing
from headrace.bus.nats import streams
from headrace.cli import main
from tests.support.keys import as_writers


@pytest.fixture
def empty_broker(tmp_path: Path) -> Iterator[Server]:
    """A running broker with credentials and no stream."""
    server = Server(tmp_path / "broker")
    uvloop.run(server.start())
    yield server
    uvloop.run(server.stop())


def test_actors_name_the_command_that_helps_and_it_does(
    empty_broker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(
        f"[run]\nid = 'r1'\ndir = '{tmp_path}'\n[bus]\nurl = '{empty_broker.url}'\n"
        f"credentials = '{empty_broker.credentials}'\n"
    )
    assert main.main(["actor", "dead_letter", "--config", str(config)]) == 4
    said = capsys.readouterr().err
    absent = len(permissions.known("dead_letter"))
    assert said.count("\n") == 1 and f"lacks {absent} of" in said and "headrace bus declare --url" in said

    for _ in range(2):
        assert main.main(["bus", "declare", "--config", str(config)]) == 0
        assert f"has all {len(permissions.NAMES)} streams" in capsys.readouterr().out

    async def one_removed() -> None:
        async with await as_writers(empty_broker.url, empty_broker.credentials) as admin:
            await streams.require(admin.connection)
            await admin.connection.api("STREAM.DELETE.HR_STEP")
            with pytest.raises(StreamMissing, match=r"lacks 1 of \d+ streams \(HR_STEP\)"):
                await streams.require(admin.connection)
            with pytest.raises(StreamMissing, match="headrace bus declare"):
                [received async for received in admin.history("HR_STEP")]

    uvloop.run(one_removed())


def test_streams_of_an_earlier_headrace_are_named_until_they_are_declared_again(
    empty_broker: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ["--url", empty_broker.url, "--credentials", str(empty_broker.credentials)]
    assert main.main(["bus", "declare", *address]) == 0
    earlier: dict[str, dict[str, object]] = {  # stream to the properties that it had
        "HR_BLOB": {"allow_msg_ttl": False},
        "HR_STEP": {"subjects": ["hr.step.old"]},
        "HR_EVENT": {"discard": "new"},
        "KV_HR_PRODUCT": {"max_msgs_per_subject": 1},
    }

    async def said(changes: dict[str, object], name: str) -> str:
        async with await as_writers(empty_broker.url, empty_broker.credentials) as admin:
            api = admin.connection.api
            now = msgspec.json.decode(await api(f"STREAM.INFO.{name}"))["config"]
            if name == "HR_BLOB":  # the broker does not turn this off again
                await api(f"STREAM.DELETE.{name}")
                await api(f"STREAM.CREATE.{name}", now | changes)
            else:
                await api(f"STREAM.UPDATE.{name}", now | changes)
            with pytest.raises(StreamMissing) as outdated:
                await streams.require(admin.connection)
            return str(outdated.value)

    for name, changes in earlier.items():
        text = uvloop.run(said(changes, name))
        assert f"declared by an earlier headrace ({name}: " in text and "headrace bus declare --url" in text
        assert next(iter(changes)) in text or "does not take hr.step.>" in text
        assert main.main(["bus", "declare", *address]) == 0

    async def accepted() -> None:
        async with await as_writers(empty_broker.url, empty_broker.credentials) as admin:
            api = admin.connection.api
            now = msgspec.json.decode(await api("STREAM.INFO.HR_STEP"))["config"]
            later = {"subjects": [*now["subjects"], "hr.later.>"], "max_bytes": 1 << 30, "max_age": 10**15}
            await api("STREAM.UPDATE.HR_STEP", now | later)
            await streams.require(admin.connection)

    uvloop.run(accepted())


def test_a_broker_of_accounts_serves_the_runs_that_have_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_accounts(tmp_path / "broker" / "credentials", ["r1", "r2"])
    (tmp_path / "broker" / "nats.conf").write_bytes(CONF.read_bytes())
    server = Server(tmp_path / "broker", prepared=True)
    uvloop.run(server.start())

    def config(run: str) -> str:
        path = tmp_path / f"{run}.toml"
        path.write_text(
            f"[run]\nid = '{run}'\ndir = '{tmp_path}/runs'\n[bus]\nurl = '{server.url}'\ncredentials = '{keys}'\n"
            "[environment]\nbackend = 'process'\n"
        )
        return str(path)

    async def streams_of(run: str) -> bool:
        async with await Bus.connect(server.url, role="operator", credentials=keys / run) as bus:
            try:
                await streams.require(bus.connection)
            except StreamMissing:
                return False
            return True

    try:
        assert main.main(["bus", "declare", "--config", config("r1"), "--run", "r1"]) == 0
        assert uvloop.run(streams_of("r1")) and not uvloop.run(streams_of("r2"))
        assert main.main(["bus", "declare", "--config", config("r1")]) == 0
        assert "in each of 2 accounts" in capsys.readouterr().out
        assert uvloop.run(streams_of("r2"))
        for command in (["actor", "dead_letter", "--config"], ["up"], ["status", "--config"]):
            assert main.main([*command, config("r3")]) == 4, command
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and "has accounts of r1, r2 and none of the run 'r3'" in said, command
        assert not (tmp_path / "runs" / "r3").exists()
    finally:
        uvloop.run(server.stop())
