"""The broker dies by kill -9 and comes back on the same port and store: readers, consumers and actors go on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import Denied, Disconnected, NoResponders
from headrace.bus.nats.connection import NatsConnection
from headrace.bus.nats.received import Received
from headrace.bus.nats.streams import declare
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.supervisor import Supervisor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.operations import Ack, Event, Heartbeat, Ping
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
T = TypeVar("T")


def _stop(pid: int) -> None:
    """Stop a child. It still answers for a moment after the signal: its last thread has stopped when this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


class Broker:
    """A broker that can be killed and started again on the same port and store."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder)

    async def restart(self) -> None:
        port = self.server.port
        await self.server.kill()
        self.server = await Server(self.server.folder, port=port).start()

    async def die_before_it_confirms(self, connection: NatsConnection, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that waits for a confirmation (a PONG), during which the broker dies and comes back."""
        asked = asyncio.Event()
        send_ping = connection.client._send_ping

        async def sending(pong: asyncio.Future[bool] | None = None) -> None:
            await send_ping(pong)
            asked.set()

        _stop(self.server.pid)
        connection.client._send_ping = sending  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(work)
        await asked.wait()
        await self.restart()
        async with asyncio.timeout(PATIENCE_S):
            return await task

    async def connect(self, role: str = "admin") -> Bus:
        if role == "admin":
            return await as_writers(self.server.url, self.server.credentials)
        return await Bus.connect(self.server.url, role=role, credentials=self.server.credentials)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    made = Broker(tmp_path)
    await made.server.start()
    admin = await made.connect()
    await declare(admin)
    await admin.close()
    yield made
    await made.server.stop()


def event(text: str) -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


async def test_follow_goes_on_without_loss_or_repeat(broker: Broker) -> None:
    writer, reader = await broker.connect(), await broker.connect("operator")
    where = s.EVENT.at(run="r1", actor="admin", type="event")
    other = s.EVENT.at(run="r1", actor="admin", type="rejected")
    seen: list[str] = []
    half = asyncio.Event()

    async def follow() -> None:
        async for received in reader.follow("HR_EVENT", where):
            seen.append(received.message.text)
            if len(seen) == 50:
                half.set()
            if len(seen) == 150:
                return

    task = asyncio.create_task(follow())
    for n in range(50):
        await writer.publish(where, event(str(n)))
        await writer.publish(other, event("noise"))
    await asyncio.wait_for(half.wait(), PATIENCE_S)
    await broker.restart()
    for n in range(50, 100):
        await writer.publish(where, event(str(n)))
    await writer.purge("HR_EVENT", subject=other)
    await broker.restart()
    for n in range(100, 150):
        await writer.publish(where, event(str(n)))
    await asyncio.wait_for(task, PATIENCE_S)
    assert seen == [str(n) for n in range(150)]
    await writer.close()
    await reader.close()


async def test_history_and_blobs_are_whole_when_the_broker_dies_in_the_middle(broker: Broker) -> None:
    writer, reader = await broker.connect(), await broker.connect("operator")
    where = s.EVENT.at(run="r1", actor="admin", type="event")
    big = event(os.urandom(1 << 20).hex())
    await asyncio.gather(*(writer.publish(where, event(str(n))) for n in range(700)))
    await writer.publish(where, big)
    read = []
    async for received in reader.history("HR_EVENT", where):
        read.append(received)
        if len(read) in (1, 300, 650):
            await broker.restart()
    assert len({received.seq for received in read}) == len(read) == 701
    assert read[-1].message == big
    await writer.close()
    await reader.close()


async def test_history_without_a_broker_is_an_error_and_never_an_empty_stream(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.bus.nats.connection.AWAY_S", 0.2)
    reader = await broker.connect("operator")
    where = s.EVENT.at(run="r1", actor="admin", type="event")
    writer = await broker.connect()
    await asyncio.gather(*(writer.publish(where, event(str(n))) for n in range(700)))
    await writer.close()
    with pytest.raises(Disconnected):
        async for _ in reader.history("HR_EVENT", where):
            await broker.server.kill()
            await reader.close()  # gives up for good, as a drained process does
    assert reader.connection.closed.is_set()


async def test_closing_while_the_connection_breaks_cancels_nobody(broker: Broker) -> None:
    """nats-py's reconnecting task and its `close` wait for one future: the end of the former cancels the latter."""
    links = [(await broker.connect()).connection for _ in range(16)]

    async def close(connection: NatsConnection, turns: int) -> None:
        while not connection.client.is_reconnecting:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await connection.close()

    closing = [asyncio.create_task(close(connection, turns)) for turns, connection in enumerate(links)]
    await asyncio.gather(broker.server.kill(), *closing)
    assert all(connection.closed.is_set() for connection in links)


async def test_a_consumer_pulls_again_and_nothing_is_lost(broker: Broker) -> None:
    class Reader(Actor):
        role = "admin"

    actor = Reader(Config(), await broker.connect(), "r1", "reader")
    writer = await broker.connect()
    where = s.EVENT.at(run="r1", actor="admin", type="input")
    seen: set[str] = set()
    half, done = asyncio.Event(), asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        seen.add(received.message.text)
        if len(seen) == 30:
            half.set()
        if len(seen) == 60:
            done.set()

    await actor.consume(s.EVENT, handle, durable="reader", filter=where, credit=4, ack_wait=1.0)
    await actor.serve("hr.rpc.admin.operator.r.ping", _answer)
    for n in range(30):
        await writer.publish(where, event(str(n)))
    await asyncio.wait_for(half.wait(), PATIENCE_S)
    await broker.restart()
    for n in range(30, 60):
        await writer.publish(where, event(str(n)))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert seen == {str(n) for n in range(60)}
    asker = await broker.connect("operator")
    assert await asker.request("hr.rpc.admin.operator.r.ping", Ping(note="still here")) == Ack(detail="still here")
    await asker.close()
    await actor.shut(5)
    await actor.bus.close()
    await writer.close()


async def _answer(message: Ping) -> Ack:
    return Ack(detail=message.note)


async def test_a_request_in_flight_ends_at_the_break(broker: Broker) -> None:
    asker, helper = await broker.connect("judge"), await broker.connect("environment")
    asked = asyncio.Event()

    async def never(_: object) -> Ack:
        asked.set()
        await asyncio.Event().wait()
        return Ack()

    await helper.respond("hr.rpc.environment.judge.never", never)
    call = asyncio.create_task(asker.request("hr.rpc.environment.judge.never", Ping(), timeout=3600.0))
    await asked.wait()
    await broker.restart()
    with pytest.raises((Disconnected, NoResponders)):
        async with asyncio.timeout(PATIENCE_S):
            await call
    await asker.close()
    await helper.close()


async def test_a_watch_goes_on(broker: Broker) -> None:
    bus = await broker.connect()
    kv = await bus.kv("HR_ADMISSION")
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def watch() -> None:
        async for _, value, _ in kv.watch("a.>"):
            await seen.put(value)

    task = asyncio.create_task(watch())
    await kv.put("a.x", Ack(detail="1"))
    assert await asyncio.wait_for(seen.get(), PATIENCE_S) == Ack(detail="1")
    await broker.restart()
    await kv.put("a.x", Ack(detail="2"))
    assert await asyncio.wait_for(seen.get(), PATIENCE_S) == Ack(detail="2")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bus.close()


async def test_actors_live_through_it(broker: Broker) -> None:
    class Judge(Actor):
        role = "judge"
        starts = 0

        async def start(self) -> None:
            type(self).starts += 1

    run = f"r{token_hex(4)}"
    life = Supervisor(Config(), run, url=broker.server.url, credentials=broker.server.credentials)
    task = asyncio.create_task(life.run([(Judge, "j1")]))
    operator = await broker.connect("operator")
    presence = await operator.kv("HR_PRESENCE")
    async for _, beat, revision in presence.watch("judge.j1"):
        before = revision
        if isinstance(beat, Heartbeat) and beat.state == "running":  # the first ones come before it has started
            break
    await broker.restart()
    async for _, _, revision in presence.watch("judge.j1"):
        if revision > before:
            break
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert Judge.starts == 1
    await operator.close()


async def test_an_actor_whose_confirmation_is_lost_during_its_start_goes_on(broker: Broker) -> None:
    subject = "hr.rpc.judge.operator.test"

    class Judge(Actor):
        role = "judge"
        starts = 0

        async def start(self) -> None:
            type(self).starts += 1
            await broker.die_before_it_confirms(self.bus.connection, self.serve(subject, _answer))

    run = f"r{token_hex(4)}"
    life = Supervisor(Config(), run, url=broker.server.url, credentials=broker.server.credentials)
    task = asyncio.create_task(life.run([(Judge, "j1")]))
    operator = await broker.connect("admin")
    kinds: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for received in operator.follow("HR_EVENT", s.EVENT.where(run=run, type="event")):
            kinds.append(received.message.kind)
            if kinds[-1] == "started":
                break
    assert (Judge.starts, kinds) == (1, ["started"]), "it was not started again, and reported no failure"
    assert await operator.request(subject, Ping(note="x")) == Ack(detail="x")
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    await operator.close()


async def test_a_lost_confirmation_ends_its_wait_at_the_break_and_a_refusal_is_not_missed(broker: Broker) -> None:
    bus = await broker.connect("judge")
    with pytest.raises(Disconnected, match="broke"):  # its own limit gives another sentence
        await broker.die_before_it_confirms(bus.connection, bus.connection.flush(3600.0))
    await bus.connection.wait_connected(PATIENCE_S)
    with pytest.raises(Denied):
        await broker.die_before_it_confirms(bus.connection, bus.listen("hr.task.>", _ignore))
    await bus.close()


async def _ignore(_: object) -> None:
    """Takes a message and does nothing with it."""


async def test_a_reconnection_that_is_cancelled_while_its_attempt_fails_ends(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a process the loop cancels every task once; one that goes on keeps the process for ever."""
    bus = await broker.connect()
    attempts: list[asyncio.Task[object]] = []
    ended = asyncio.Event()

    async def refused(*_: object, **__: object) -> object:
        [reconnection] = [task for task in asyncio.all_tasks() if "_attempt_reconnect" in repr(task.get_coro())]
        if not attempts:
            reconnection.add_done_callback(lambda _: ended.set())
        attempts.append(reconnection)
        reconnection.cancel()
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refused)
    await broker.server.kill()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    assert len(attempts) == 1
    await bus.close()
