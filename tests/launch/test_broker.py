"""The broker of a run: a nats-server that is stopped and not continued is killed and started again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace import process_stat
from headrace.config import Bus, Config
from headrace.launch import runs
from headrace.launch.broker import Broker
from headrace.launch.supervision import children

pytestmark = pytest.mark.anyio


async def test_a_stopped_broker_is_killed_and_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOOK_S", 0.02)
    monkeypatch.setattr(children, "STOPPED_S", 0.1)
    broker, causes = Broker(Config(bus=Bus(port=0)), runs.create(tmp_path, "r1")), list[str]()
    await broker.start()
    restarted = asyncio.Event()

    def note(_: str, why: str) -> None:
        causes.append(why)
        restarted.set()

    watching = asyncio.create_task(broker.watch(note))
    try:
        first = broker.pid
        os.kill(first, signal.SIGSTOP)
        await restarted.wait()
        assert causes == [process_stat.stopped_too_long(first)]
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await broker.stop()
