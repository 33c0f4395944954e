"""The gateway's key of a run: for its user alone, and as long as the run."""

import stat
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Production, Run
from headrace.gateway.tenants.keys import digest_of
from headrace.gateway.tenants.store import add, entries
from headrace.launch.product.gateway_key import key_of_run, place
from headrace.messages.product import USUAL
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


def config(folder: Path) -> Config:
    return Config(run=Run(dir=str(folder)), production=Production(tenant="home", training_allowed=True))


async def test_a_run_has_a_key_until_it_ends(connect: Connect, server: Server, tmp_path: Path) -> None:
    operator, folder = await connect("operator"), tmp_path / "r1"
    folder.mkdir()
    other = digest_of(await add(operator, "acme"))
    async with key_of_run(config(tmp_path), folder, server.url, str(server.credentials)) as path:
        assert path == place(folder) and stat.S_IMODE(path.stat().st_mode) == 0o600
        made = digest_of(path.read_text())
        (entry,) = [each for each in await entries(operator) if each.digest == made]
        assert (entry.tenant, entry.training, entry.scopes) == ("home", True, USUAL)
    left = {each.digest for each in await entries(operator)}
    assert not path.exists() and made not in left and other in left


async def test_the_key_of_an_interrupted_run_ends_with_its_next_start(
    connect: Connect, server: Server, tmp_path: Path
) -> None:
    operator, folder = await connect("operator"), tmp_path / "r1"
    folder.mkdir()
    place(folder).write_text(left := await add(operator, "home"))
    async with key_of_run(config(tmp_path), folder, server.url, str(server.credentials)) as path:
        digests = {each.digest for each in await entries(operator)}
        assert digest_of(left) not in digests and digest_of(path.read_text()) in digests


async def test_a_broker_that_is_gone_leaves_the_file_for_the_next_start(
    connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r1"
    folder.mkdir()
    broker = Server(tmp_path / "broker")
    await broker.start()
    async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
        await declare(admin)
    async with key_of_run(config(tmp_path), folder, broker.url, str(broker.credentials)) as path:
        await broker.stop()
    assert path.exists() and "is not revoked" in capsys.readouterr().err
