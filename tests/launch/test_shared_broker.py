"""Two runs of `headrace up` at the same time on one broker, each in an account of its own."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace.bus.broker import credentials
from headrace.bus.broker.server import CONF, Server
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from tests.launch.test_up import up
from tests.support.keys import as_writers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]
RUNS = ("r1", "r2")


async def test_two_runs_finish_and_neither_holds_a_record_of_the_other(tmp_path: Path) -> None:
    keys = credentials.write_accounts(tmp_path / "broker" / "credentials", RUNS)
    (tmp_path / "broker" / "nats.conf").write_bytes(CONF.read_bytes())
    async with Server(tmp_path / "broker", prepared=True) as server:

        async def one(run: str) -> None:
            folder = tmp_path / run
            folder.mkdir()
            shared = {"bus.url": server.url, "bus.credentials": str(keys), "run.id": run, "curriculum.steps": 2}
            async with up(folder, **shared) as started:
                code, said = await started.end(600.0)
            assert code == 0, said
            assert json.loads((folder / "runs" / run / "report.json").read_text())["ledger"]["balanced"]

        async with asyncio.TaskGroup() as group:
            for run in RUNS:
                group.create_task(one(run))
        for run in RUNS:
            async with await as_writers(server.url, keys / run) as admin:
                await declare(admin)
                for stream, token in (("HR_LEDGER", 2), ("HR_TRAJ", 2), ("HR_STEP", 2), ("HR_EVENT", 2)):
                    run_tokens = {received.subject.split(".")[token] async for received in admin.history(stream)}
                    assert run_tokens == {s.token(run)}, stream
