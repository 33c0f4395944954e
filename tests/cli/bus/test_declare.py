"""A broker without streams: actors say what is missing, `headrace bus declare` creates it, twice without harm."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import StreamMissing
from headrace.bus.nats import streams
from headrace.cli import main


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
    assert said.count("\n") == 1 and f"lacks {len(streams.NAMES)} of" in said and "headrace bus declare --url" in said

    for _ in range(2):
        assert main.main(["bus", "declare", "--config", str(config)]) == 0
        assert f"has all {len(streams.NAMES)} streams" in capsys.readouterr().out

    async def one_removed() -> None:
        async with await Bus.connect(empty_broker.url, role="admin", credentials=empty_broker.credentials) as admin:
            await streams.require(admin.connection)
            await admin.connection.api("STREAM.DELETE.HR_STEP")
            with pytest.raises(StreamMissing, match=r"lacks 1 of \d+ streams \(HR_STEP\)"):
                await streams.require(admin.connection)
            with pytest.raises(StreamMissing, match="headrace bus declare"):
                [received async for received in admin.history("HR_STEP")]

    uvloop.run(one_removed())


def test_without_an_address_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bus", "declare"]) == 4
    assert "expected a broker" in capsys.readouterr().err
