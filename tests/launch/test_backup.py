"""The drill: a run's streams are backed up, restored into a fresh nats-server, and audited there."""

import json
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from tests.launch.test_up import FEW, command, up
from tests.support.keys import as_writers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_restored_run_balances_as_the_first_one_did(tmp_path: Path) -> None:
    async with up(tmp_path, **FEW, **{"curriculum.steps": 2, "run.id": "r1"}) as started:
        assert (await started.end(500.0))[0] == 0
    ledger = json.loads(command(tmp_path, "audit").stdout)
    made = command(tmp_path, "bus", "backup", "copy")
    assert made.returncode == 0 and made.stdout.startswith("run r1: "), made.stderr
    again = command(tmp_path, "bus", "backup", "copy")
    assert again.returncode == 4 and "copy is not empty; name a new folder" in again.stderr

    async with Server(tmp_path / "fresh") as server:
        toml = f'[run]\nid = "r1"\n[bus]\nurl = "{server.url}"\ncredentials = "{server.credentials}"\n'
        (tmp_path / "fresh.toml").write_text(toml)
        file = tmp_path / "copy" / "HR_LEDGER"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        damaged = command(tmp_path, "bus", "restore", "copy", "--config", "fresh.toml")
        assert damaged.returncode == 4 and "HR_LEDGER is missing or damaged, so nothing was restored" in damaged.stderr
        file.write_bytes(whole)
        restored = command(tmp_path, "bus", "restore", "copy", "--config", "fresh.toml")
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.split(" are restored")[0] == made.stdout.split(" streams, ")[0] + " streams"
        audit = command(tmp_path, "audit", "--config", "fresh.toml")
        assert audit.returncode == 0 and json.loads(audit.stdout) == ledger and ledger["trained"] > 0
        twice = command(tmp_path, "bus", "restore", "copy", "--config", "fresh.toml")
        assert twice.returncode == 4 and "a restore needs a broker without it" in twice.stderr
        async with await as_writers(server.url, server.credentials) as admin:
            last = await admin.last("HR_LEDGER", "hr.ledger.>")
            assert last is not None, "sequences and records are read as before"
