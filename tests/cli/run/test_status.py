"""`headrace status` on a run whose broker is active."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.launch import runs
from headrace.messages.operations import Heartbeat
from tests.support.keys import as_writers


def test_an_unreadable_presence_entry_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = runs.create(tmp_path / "runs", "r1")

    async def body() -> int:
        async with Server(folder.broker) as server:
            async with await as_writers(server.url, server.credentials) as admin:
                await declare(admin)
                heartbeat = Heartbeat(actor="judge", id="judge-1", node="n", pid=1, state="running")
                await (await admin.kv("HR_PRESENCE")).put("judge.judge-1", heartbeat)
                await admin.publish_raw("$KV.HR_PRESENCE.judge.judge-2", b"{}", {"Hr-Type": "heartbeat/9"})
            return await asyncio.to_thread(main, ["status", "r1"])

    assert uvloop.run(body()) == 0
    out = capsys.readouterr()
    assert "run r1: active" in out.out and "judge-1" in out.out and "judge-2" not in out.out
    assert out.err.startswith("headrace: skipped an unreadable record: KV_HR_PRESENCE")
    assert "judge.judge-2" in out.err and len(out.err.splitlines()) == 1
