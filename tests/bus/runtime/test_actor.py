"""The actor runtime against a real broker: settle, retry, dead letters, credit, heartbeats, drain."""

import asyncio
from secrets import token_hex
from typing import Any

import pytest

from headrace.bus.connection import Bus
from headrace.bus.errors import Reject, Retry
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.operations import Ack, Advisory, Event, Ping, Rejected
from headrace.messages.product import Traffic
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import TaskRef
from headrace.metrics.figures import FIGURES, Figure
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class Probe(Actor):
    role = "admin"


def make(bus: Bus, run: str = "") -> Probe:
    return Probe(Config(), bus, run or f"r{token_hex(4)}", "probe-1")


def event(text: str) -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


async def publish(actor: Actor, *texts: str) -> list[int]:
    where = s.EVENT.at(run=actor.run, actor="judge", type="input")
    return [await actor.bus.publish(where, event(text)) for text in texts]


def inputs(actor: Actor) -> str:
    return s.EVENT.where(run=actor.run, actor="judge", type="input")


async def advisory(bus: Bus, durable: str) -> Received[Advisory]:
    async for received in bus.follow("HR_ADVISORY", s.ADVISORY.where(stream="HR_EVENT", consumer=durable)):
        return received
    raise AssertionError


async def pending(bus: Bus, stream: str, durable: str) -> tuple[int, int]:
    import json

    info = json.loads(await bus.connection.api(f"CONSUMER.INFO.{stream}.{durable}"))
    return info["num_pending"], info["num_ack_pending"]


async def test_each_message_is_handled_once_and_acknowledged(connect: Connect) -> None:
    actor = make(await connect())
    seen: list[str] = []
    done = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        seen.append(received.message.text)
        if len(seen) == 50:
            done.set()

    texts = [str(n) for n in range(50)]
    await publish(actor, *texts[:20])
    durable = f"d{token_hex(4)}"
    await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor), ack_sync=True)
    await publish(actor, *texts[20:])
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    await actor.shut(5)
    assert seen == texts, "credit 1 keeps the order"
    assert await pending(actor.bus, "HR_EVENT", durable) == (0, 0)


async def test_a_new_consumer_goes_on_where_the_last_one_was(connect: Connect) -> None:
    bus = await connect()
    first = make(bus)
    seen: list[str] = []
    got = asyncio.Semaphore(0)

    async def handle(received: Received[Event]) -> None:
        seen.append(received.message.text)
        got.release()

    durable = f"d{token_hex(4)}"
    await first.consume(s.EVENT, handle, durable=durable, filter=inputs(first), start=1)
    await publish(first, "a", "b")
    await got.acquire(), await got.acquire()
    await first.shut(5)
    await publish(first, "c")
    second = make(bus, first.run)
    # another start than the first time: the position that exists counts
    await second.consume(s.EVENT, handle, durable=durable, filter=inputs(first), start="new")
    await asyncio.wait_for(got.acquire(), PATIENCE_S)
    await second.shut(5)
    assert seen == ["a", "b", "c"]


async def test_retry_comes_again_and_failures_become_dead_letters(connect: Connect) -> None:
    actor = make(await connect())
    tries: dict[str, int] = {}
    fine = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        text = received.message.text
        tries[text] = received.deliveries
        if text == "later" and received.deliveries < 3:
            raise Retry(0.01, "not yet")
        if text == "reject":
            raise Reject("makes no sense")
        if text == "poison":
            raise ValueError("boom")
        if text == "later":
            fine.set()

    durable = f"d{token_hex(4)}"
    await actor.consume(
        s.EVENT, handle, durable=durable, filter=inputs(actor), credit=4, max_deliver=3, backoff=(0.01,)
    )
    seqs = await publish(actor, "later", "reject", "poison")
    await asyncio.wait_for(fine.wait(), PATIENCE_S)
    reasons: dict[int, str] = {}
    async for received in actor.bus.follow("HR_ADVISORY", s.ADVISORY.where(stream="HR_EVENT", consumer=durable)):
        reasons[received.message.stream_seq] = received.message.reason
        if len(reasons) == 2:
            break
    assert reasons == {seqs[1]: "makes no sense", seqs[2]: "given up after 3 deliveries: ValueError: boom"}
    assert tries == {"later": 3, "reject": 1, "poison": 3}
    assert await pending(actor.bus, "HR_EVENT", durable) == (0, 0)
    admin_events = s.EVENT.at(run=actor.run, actor="admin", type="event")
    events = [r.message async for r in actor.bus.history("HR_EVENT", admin_events)]
    assert {e.kind for e in events} == {"retry", "rejected"} and any("boom" in e.text for e in events)
    await actor.shut(5)


async def test_an_unknown_type_is_a_dead_letter_at_once(connect: Connect) -> None:
    actor = make(await connect())

    async def handle(received: Received[Event]) -> None:
        raise AssertionError("never called")

    durable = f"d{token_hex(4)}"
    await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor))
    where = s.EVENT.at(run=actor.run, actor="judge", type="input")
    await actor.bus.publish_raw(where, b"\x80", {"Hr-Type": "from_the_future/7"})
    told = await asyncio.wait_for(advisory(actor.bus, durable), PATIENCE_S)
    assert told.message.kind == "terminated" and "from_the_future/7" in told.message.reason
    await actor.shut(5)


def request(run: str, slot: int) -> RolloutRequest:
    task = TaskRef("generated/train", "t1")
    return RolloutRequest(run=run, lane="train", group="g1", slot=slot, attempt=0, task=task, seed=1)


async def test_a_work_queue_keeps_a_copy_of_what_it_gives_up(connect: Connect) -> None:
    """A terminated message leaves a work queue at once, so its copy must be on the bus before that."""
    actor = make(await connect("rollout"))

    async def handle(received: Received[RolloutRequest]) -> None:
        raise Reject("no such suite")

    await actor.consume(s.TASK, handle, durable=f"rollout-{actor.run}-train")
    where = s.TASK.at(run=actor.run, lane="train", suite="generated-train")
    seq = await actor.bus.publish(where, request(actor.run, 3))
    async for received in actor.bus.follow("HR_EVENT", s.EVENT.where(run=actor.run, type="rejected")):
        copy = received.message
        break
    assert isinstance(copy, Rejected) and copy.stream_seq == seq and copy.reason == "no such suite"
    from headrace.messages.codec import decode

    assert decode(copy.payload, copy.headers) == request(actor.run, 3)
    await actor.shut(5)


async def test_credit_bounds_what_is_in_flight(connect: Connect) -> None:
    actor = make(await connect())
    gate, most, handled = asyncio.Semaphore(0), 0, 0
    running = 0
    full = asyncio.Event()
    done = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        nonlocal running, most, handled
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await gate.acquire()
        running -= 1
        handled += 1
        if handled == 40:
            done.set()

    await publish(actor, *(str(n) for n in range(40)))
    durable = f"d{token_hex(4)}"
    consumer = await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor), credit=4)
    await asyncio.wait_for(full.wait(), PATIENCE_S)
    assert consumer.in_flight == 4
    left, outstanding = await pending(actor.bus, "HR_EVENT", durable)
    assert (left, outstanding) == (36, 4), "the broker keeps the rest for others"
    for _ in range(40):
        gate.release()
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert most == 4
    await actor.shut(5)


async def test_pause_leaves_messages_to_others_and_resume_takes_them(connect: Connect) -> None:
    actor = make(await connect())
    seen = asyncio.Queue[str]()

    async def handle(received: Received[Event]) -> None:
        await seen.put(received.message.text)

    durable = f"d{token_hex(4)}"
    consumer = await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor), credit=8)
    consumer.pause()
    await publish(actor, "before the first pull")
    await actor.bus.connection.flush()
    assert await pending(actor.bus, "HR_EVENT", durable) == (1, 0), "paused at once: nothing was pulled"
    consumer.resume()
    assert await asyncio.wait_for(seen.get(), PATIENCE_S) == "before the first pull"
    consumer.pause()
    while consumer._subscription is not None:
        await asyncio.sleep(0.01)
    await publish(actor, "while paused")
    await actor.bus.connection.flush()
    assert await pending(actor.bus, "HR_EVENT", durable) == (1, 0)
    consumer.resume()
    assert await asyncio.wait_for(seen.get(), PATIENCE_S) == "while paused"
    await actor.shut(5)


async def test_heartbeats_keep_a_long_handler_from_redelivery(connect: Connect) -> None:
    actor = make(await connect())
    deliveries: list[int] = []
    done = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        deliveries.append(received.deliveries)
        if received.message.text == "long":
            await asyncio.sleep(2.5)  # longer than two acknowledgement waits
        else:
            done.set()

    durable = f"d{token_hex(4)}"
    await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor), ack_wait=1.0)
    await publish(actor, "long", "next")
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert deliveries == [1, 1]
    await actor.shut(5)


async def test_drain_finishes_what_runs_and_gives_back_the_rest(connect: Connect) -> None:
    bus = await connect()
    actor = make(bus)
    started = asyncio.Semaphore(0)
    quick = asyncio.Event()
    ended: list[str] = []

    async def handle(received: Received[Event]) -> None:
        started.release()
        if received.message.text == "quick":
            await quick.wait()
        else:
            await asyncio.Event().wait()
        ended.append(received.message.text)

    durable = f"d{token_hex(4)}"
    await actor.consume(s.EVENT, handle, durable=durable, filter=inputs(actor), credit=2)
    await publish(actor, "quick", "endless", "never started")
    await started.acquire(), await started.acquire()
    asyncio.get_running_loop().call_later(0.05, quick.set)
    await actor.shut(0.3)
    assert ended == ["quick"]
    await bus.connection.flush()
    again = make(bus, actor.run)
    texts = asyncio.Queue[tuple[str, int]]()

    async def handle_again(received: Received[Event]) -> None:
        await texts.put((received.message.text, received.deliveries))

    await again.consume(s.EVENT, handle_again, durable=durable, filter=inputs(actor), credit=2)
    got = {await asyncio.wait_for(texts.get(), PATIENCE_S), await asyncio.wait_for(texts.get(), PATIENCE_S)}
    assert got == {("endless", 2), ("never started", 1)}, "given back at once, long before the acknowledgement wait"
    await again.shut(5)


async def test_serve_listen_metric(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, ("probe", "speed"), Figure("headrace_probe_speed_ratio", "Of this test."))
    asker, actor = await connect("operator"), make(await connect())
    heard = asyncio.Queue[Message]()

    async def answer(message: Ping) -> Message:
        if message.note == "bad":
            raise RuntimeError("broken part")
        return Ack(detail=message.note)

    async def hear(message: Message) -> None:
        await heard.put(message)

    await actor.serve("hr.rpc.admin.operator.p.ping", answer)
    await actor.listen(s.TRAFFIC.where(), hear)
    await actor.listen(s.METRIC.where(), hear)
    assert await asker.request("hr.rpc.admin.operator.p.ping", Ping(note="x")) == Ack(detail="x")
    refused = await asker.request("hr.rpc.admin.operator.p.ping", Ping(note="bad"))
    assert refused == Ack(ok=False, detail="RuntimeError: broken part")
    load = Traffic(region="local", active=1, waiting=0, requests_per_s=0.5, capacity=4)
    await actor.bus.emit(s.TRAFFIC.at(region="local"), load)
    assert await asyncio.wait_for(heard.get(), PATIENCE_S) == load
    await actor.metric(speed=3.0)
    metric: Any = await asyncio.wait_for(heard.get(), PATIENCE_S)
    assert metric.values == {"speed": 3.0} and metric.actor == "probe"
    await actor.shut(5)


async def test_a_failing_background_task_fails_the_actor(connect: Connect) -> None:
    actor = make(await connect())

    async def broken() -> None:
        raise RuntimeError("gone")

    actor.spawn(broken(), "broken")
    assert str(await asyncio.wait_for(actor.failed, PATIENCE_S)) == "gone"
    await actor.shut(1)
