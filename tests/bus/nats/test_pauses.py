"""A broker that pauses, and a link that is cut off once: the next durable record is there soon after the return."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import Disconnected
from headrace.bus.nats import connection
from headrace.bus.nats.client import NatsClient
from headrace.bus.nats.received import Received
from headrace.bus.nats.streams import declare
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S
from tests.support.region_brokers import Wire

pytestmark = pytest.mark.anyio

RETURN_S = 5.0
"""Seconds after the return within which every reader has the next record."""
INPUT = s.EVENT.at(run="r1", actor="operator", type="event")


class Worker(Actor):
    """Consumes, follows, watches a bucket and publishes all the time: the ways in which actors use the bus."""

    role = "admin"

    async def start(self) -> None:
        self.heard: dict[str, asyncio.Queue[str]] = {
            name: asyncio.Queue() for name in ("consumed", "followed", "watched")
        }
        self.published = 0
        await self.consume(s.EVENT, self.handle, durable="pauses", filter=INPUT, credit=4)
        self.spawn(self.follow(), "following")
        self.spawn(self.watch(), "watching")
        self.spawn(self.publish(), "publishing")
        self.every(0.1, self.flush, "flushing")

    async def handle(self, received: Received[Event]) -> None:
        self.heard["consumed"].put_nowait(received.message.text)

    async def follow(self) -> None:
        async for received in self.bus.follow("HR_EVENT", INPUT):
            self.heard["followed"].put_nowait(received.message.text)

    async def watch(self) -> None:
        state = await self.bus.kv("HR_ADMISSION")
        async for _, value, _ in state.watch("pauses"):
            assert isinstance(value, Event)
            self.heard["watched"].put_nowait(value.text)

    async def publish(self) -> None:
        while True:
            await self.event("tick", str(self.published))
            self.published += 1
            await asyncio.sleep(0.05)

    async def flush(self) -> None:
        """As subscriptions and shutdowns do; its timeout is what ended nats-py's read loop."""
        try:
            await self.bus.connection.flush(0.2)
        except Disconnected:
            pass


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(tmp_path) as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials, timeout=60.0) as admin:
            await declare(admin)
        yield broker


async def goes_on(
    server: Server, url: str, away: Callable[[], Awaitable[None]], limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker before, during and after the time in which the broker does not answer."""
    caplog.set_level(logging.ERROR)
    async with await as_writers(server.url, server.credentials, timeout=60.0) as admin:
        state = await admin.kv("HR_ADMISSION")

        async def say(text: str) -> None:
            record = Event(actor="a", id="a", run="r1", kind="test", text=text)
            await admin.publish(INPUT, record)
            await state.put("pauses", record)

        bus = await Bus.connect(url, role="admin", credentials=server.credentials, timeout=60.0)
        async with living(Worker, Config(), bus, "r1", "worker") as worker:
            await say("before")
            await heard(worker, "before", PATIENCE_S)
            await away()
            before = worker.published
            await say("after")
            await heard(worker, "after", limit)
            async with asyncio.timeout(limit):
                while worker.published < before + 2:
                    await asyncio.sleep(0.05)
            assert {name: queue.qsize() for name, queue in worker.heard.items()} == dict.fromkeys(worker.heard, 0)
        await bus.close()
    assert [record.getMessage() for record in caplog.records] == []


def limit_of(seconds: float) -> float:
    """The slow tests measure the return; the quick one runs beside others and only sees that there is one."""
    return RETURN_S if seconds >= 10.0 else PATIENCE_S


async def heard(worker: Worker, text: str, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        assert {name: await queue.get() for name, queue in worker.heard.items()} == dict.fromkeys(worker.heard, text)


def paused(server: Server, seconds: float) -> Callable[[], Awaitable[None]]:
    async def away() -> None:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(server.pid, signal.SIGCONT)

    return away


LENGTHS: list[Any] = [
    1.0,
    pytest.param(10.0, marks=pytest.mark.slow),
    pytest.param(60.0, marks=[pytest.mark.slow, pytest.mark.timeout(180)]),
]


@pytest.mark.parametrize("seconds", LENGTHS)
async def test_a_broker_that_pauses(server: Server, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    await goes_on(server, server.url, paused(server, seconds), limit_of(seconds), caplog)


@pytest.mark.parametrize("seconds", LENGTHS)
async def test_an_actor_that_is_cut_off(server: Server, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(server.port)
    await wire.mend()

    async def away() -> None:
        await wire.cut()
        await asyncio.sleep(seconds)
        await wire.mend()

    await goes_on(server, f"nats://127.0.0.1:{wire.port}", away, limit_of(seconds), caplog)
    await wire.cut()


async def test_a_connection_closes_although_its_broker_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py's close waits until the broker has read all that was sent."""
    monkeypatch.setattr(connection, "CLOSE_S", 0.3)
    cut: list[NatsClient] = []
    abort = NatsClient.abort

    def noted(client: NatsClient) -> None:
        cut.append(client)
        abort(client)

    monkeypatch.setattr(NatsClient, "abort", noted)
    async with Server(tmp_path) as server:
        bus = await Bus.connect(server.url, role="admin", credentials=server.credentials)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for _ in range(16):
                await bus.connection.client.publish("hr.r1.filler", b"x" * (1 << 20))
            async with asyncio.timeout(PATIENCE_S):
                await bus.close()
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert cut, "the broker has read everything: send more than the sockets hold"
