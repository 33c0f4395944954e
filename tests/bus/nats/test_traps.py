"""One test per trap that the measurements met (the broker's behaviour, and what we make of it)."""

import asyncio
import json
from secrets import token_hex
from typing import Any

import pytest

from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError, Denied, NoBroker
from headrace.bus.nats import consumer as consumers
from headrace.bus.nats.ordered_reader import OrderedReader
from headrace.bus.nats.received import Received
from headrace.bus.runtime import dead_letters
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.operations import Ack, Advisory, DeadLetter, Event, Ping
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import TaskRef
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class Probe(Actor):
    role = "admin"


def event(text: str = "") -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


async def test_1_a_stream_never_answers_a_request(connect: Connect) -> None:
    """A stream that captures a request's subject answers first. So no stream of ours covers request or reply."""

    async def answer(_: Message) -> Message:
        await asyncio.sleep(0.05)
        return Ack(detail="the real answer")

    for subject in (s.RPC, s.RPC_NODE, s.HEARTBEAT, s.METRIC, s.TRAFFIC):
        assert s.stream_of(subject.where()) is None
    asker, helper = await connect("judge"), await connect("environment")
    await helper.respond("hr.rpc.environment.judge.slow", answer)
    assert await asker.request("hr.rpc.environment.judge.slow", Ping()) == Ack(detail="the real answer")


async def test_2_a_work_queue_is_freed_of_what_ran_out_of_deliveries(connect: Connect) -> None:
    """After max_deliver the broker keeps a work-queue message for ever; the letter's writer removes it."""
    admin, dead_letter_actor = await connect(), await connect("dead_letter")
    run = f"r{token_hex(4)}"
    where = s.TASK.at(run=run, lane="train", suite="x")
    request = RolloutRequest(
        run=run, lane="train", group="g1", slot=0, attempt=0, task=TaskRef("generated/train", "t"), seed=1
    )
    durable = f"rollout-{run}-train"
    config = {"durable_name": durable, "name": durable, "ack_policy": "explicit", "filter_subject": where}
    config |= {"max_deliver": 2, "ack_wait": 20_000_000}  # type: ignore[dict-item]
    await admin.connection.api(
        f"CONSUMER.CREATE.HR_TASK.{durable}.{where}", {"stream_name": "HR_TASK", "config": config}
    )
    seq = await admin.publish(where, request)
    pull = b'{"batch":3,"expires":2000000000}'
    inbox = admin.connection.inbox()
    got = asyncio.Queue[Any]()
    await admin.connection.subscribe(f"{inbox}.*", got.put)  # takes it twice and dies both times
    await admin.connection.publish_request(f"$JS.API.CONSUMER.MSG.NEXT.HR_TASK.{durable}", pull, f"{inbox}.1")
    async for received in dead_letter_actor.follow("HR_ADVISORY", s.ADVISORY.where(stream="HR_TASK", consumer=durable)):
        notice = received
        break
    assert notice.message == Advisory(
        kind="max_deliver", stream="HR_TASK", consumer=durable, stream_seq=seq, deliveries=2
    )
    assert (await admin.get("HR_TASK", seq)).message == request, "this is the trap: it is still there"
    letter = await dead_letters.dead_letter_from(dead_letter_actor, notice)
    assert isinstance(letter, DeadLetter)
    assert (letter.type, letter.subject, letter.deliveries) == ("rollout_request", where, 2)
    await dead_letters.publish(dead_letter_actor, letter)
    await dead_letters.publish(dead_letter_actor, letter)
    with pytest.raises(BusError):
        await admin.get("HR_TASK", seq)
    letters = [
        r.message async for r in dead_letter_actor.history("HR_DLQ", s.DLQ.where(stream="hr_task", consumer=durable))
    ]
    assert letters == [letter], "one letter, however often its notice came"


async def test_3_the_schedule_of_repeats_does_not_shorten_the_acknowledgement_wait(connect: Connect) -> None:
    """The broker's backoff[0] replaces ack_wait, so a slow handler would be delivered twice. Ours is a delayed nak."""
    actor = Probe(Config(), await connect(), f"r{token_hex(4)}", "p")
    deliveries: list[int] = []
    done = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        deliveries.append(received.deliveries)
        if received.message.text == "slow":
            await asyncio.sleep(0.3)  # far over backoff[0], far under ack_wait
        else:
            done.set()

    where = s.EVENT.at(run=actor.run, actor="admin", type="input")
    durable = f"d{token_hex(4)}"
    await actor.consume(s.EVENT, handle, durable=durable, filter=where, ack_wait=5, backoff=(0.05,))
    config = json.loads(await actor.bus.connection.api(f"CONSUMER.INFO.HR_EVENT.{durable}"))["config"]
    assert "backoff" not in config and config["ack_wait"] == 5_000_000_000
    await actor.bus.publish(where, event("slow"))
    await actor.bus.publish(where, event("end"))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert deliveries == [1, 1]
    await actor.shut(5)


async def test_4_a_full_stream_is_back_pressure(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, where = await connect(), s.STEP.at(run=f"r{token_hex(4)}")
    config = json.loads(await bus.connection.api("STREAM.INFO.HR_STEP"))["config"]
    await bus.connection.api("STREAM.PURGE.HR_STEP")
    await bus.connection.api("STREAM.UPDATE.HR_STEP", config | {"max_msgs": 2})
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    bus.on_full = told.set_result
    for n in range(2):
        await bus.publish(where, event(str(n)))
    blocked = asyncio.create_task(bus.publish(where, event("waits")))
    assert "the stream is full" in await asyncio.wait_for(told, PATIENCE_S)
    assert not blocked.done()
    assert await bus.purge("HR_STEP", subject=where, before=await bus.last_seq("HR_STEP")) == 1
    assert await asyncio.wait_for(blocked, PATIENCE_S) == await bus.last_seq("HR_STEP")
    bus.patience_s, bus.on_full = 0.1, None
    with pytest.raises(BusError, match=r"could not be stored within 0.1 s: maximum messages exceeded"):
        await bus.publish(where, event("given up"))
    await bus.connection.api("STREAM.UPDATE.HR_STEP", config)


async def test_5_a_forbidden_publish_fails_at_once(connect: Connect) -> None:
    bus = await connect("judge")
    async with asyncio.timeout(PATIENCE_S):  # nats-py alone ends in a timeout of its own, which is another error
        with pytest.raises(Denied) as denied:
            await bus.publish("hr.step.r1", event())
        assert str(denied.value) == "role 'judge' may not publish on hr.step.r1"


async def test_6_connect_is_bounded_also_when_nobody_speaks() -> None:
    """A port that accepts connections and sends nothing, like a stopped process."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoBroker):
            await Bus.connect(f"nats://127.0.0.1:{port}", role="judge", timeout=0.3)
    listener.close()


async def test_8_json_on_one_line_with_commas_is_what_runs(connect: Connect) -> None:
    """nats.conf is the file that runs, and the broker took all of it."""
    connection = (await connect()).connection
    assert connection.client.max_payload == 8 << 20
    info = json.loads(await connection.api("INFO"))
    assert info["limits"]["max_storage"] == -1


async def test_9_a_reader_that_is_too_slow_is_told_of(connect: Connect) -> None:
    bus = await connect()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    bus.connection.on_error.append(lambda text: None if told.done() else told.set_result(text))
    stuck = asyncio.Event()

    async def slow(_: object) -> None:
        await stuck.wait()

    await bus.connection.client.subscribe("hr.traffic.slow", cb=slow, pending_msgs_limit=4)
    for _ in range(10):
        await bus.connection.send("hr.traffic.slow", b"x")
    assert "hr.traffic.slow is too slow" in await asyncio.wait_for(told, PATIENCE_S)
    assert bus.connection.dropped > 0
    stuck.set()


async def test_10_pulls_overlap_and_never_ask_for_more_than_free_hands(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Probe(Config(), await connect(), f"r{token_hex(4)}", "p")
    asked: list[tuple[int, int]] = []
    original = consumers.Consumer._ask

    async def counted(self: consumers.Consumer, count: int) -> None:
        asked.append((count, self.in_flight + self._asked))
        await original(self, count)

    monkeypatch.setattr(consumers.Consumer, "_ask", counted)
    done, seen = asyncio.Event(), 0

    async def handle(received: Received[Event]) -> None:
        nonlocal seen
        await asyncio.sleep(0)
        seen += 1
        if seen == 200:
            done.set()

    where = s.EVENT.at(run=actor.run, actor="admin", type="input")
    await asyncio.gather(*(actor.bus.publish(where, event(str(n))) for n in range(200)))
    await actor.consume(s.EVENT, handle, durable=f"d{token_hex(4)}", filter=where, credit=16)
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert all(count + held <= 16 for count, held in asked)
    assert len(asked) < 100, "refilled by halves, not one by one"
    await actor.shut(5)


async def test_11_ack_sync_is_confirmed_before_the_next_step(connect: Connect) -> None:
    actor = Probe(Config(), await connect(), f"r{token_hex(4)}", "p")
    where, durable = s.EVENT.at(run=actor.run, actor="admin", type="input"), f"d{token_hex(4)}"
    settled = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        await received.ack_sync()
        info = json.loads(await actor.bus.connection.api(f"CONSUMER.INFO.HR_EVENT.{durable}"))
        assert info["num_ack_pending"] == 0 and info["ack_floor"]["stream_seq"] == received.seq
        settled.set()

    await actor.consume(s.EVENT, handle, durable=durable, filter=where)
    await actor.bus.publish(where, event())
    await asyncio.wait_for(settled.wait(), PATIENCE_S)
    await actor.shut(5)


async def test_a_refused_api_call_has_its_numbers(connect: Connect) -> None:
    with pytest.raises(ApiError) as caught:
        await (await connect()).connection.api("CONSUMER.INFO.HR_STEP.nothing")
    assert (caught.value.status, caught.value.err_code) == (404, 10014)


async def test_a_cancelled_task_ends_wherever_it_was(connect: Connect) -> None:
    """nats-py suppresses a cancellation that arrives while it flushes, and the task would run for ever."""
    bus = await connect()

    async def read() -> None:
        async for _ in bus.follow("HR_EVENT", s.EVENT.where(run=f"r{token_hex(4)}")):
            raise AssertionError("nothing is published there")

    for turns in range(60):  # enough of the loop to be reading in the end
        task = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        assert done, f"cancelled after {turns} turns of the loop, it goes on"
        assert task.cancelled()


async def test_readers_of_one_connection_never_share_a_consumer(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inboxes that differ only in case: a reader once took its consumer's name from its inbox, in lower case."""
    bus = await connect("rollout")
    prefix, endings = bus.connection.inbox().rpartition(".")[0], iter(("x1", "zA", "x2", "za"))
    monkeypatch.setattr(bus.connection, "inbox", lambda: f"{prefix}.{next(endings)}")
    one, other = (s.EVENT.at(run=token_hex(4), actor="rollout", type="event") for _ in range(2))
    for where in (one, other):
        await bus.publish(where, Event(actor="rollout", id="r", kind="k", text=where))
    async for live in bus.follow("HR_EVENT", one):
        assert live.subject == one
        assert [received.subject async for received in bus.history("HR_EVENT", other)] == [other]
        break


async def test_12_a_replica_that_lags_does_not_end_a_history(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker may put a reader's consumer on a replica that has just restarted, and it then has nothing or less."""
    bus, run = await connect("rollout"), token_hex(4)
    where = s.EVENT.at(run=run, actor="rollout", type="event")
    for text in "abc":
        await bus.publish(where, Event(actor="rollout", id="r", kind="k", text=text))
    create, answers = OrderedReader._create, [0, 0]

    async def lagging(reader: OrderedReader) -> int:
        pending = await create(reader)
        return answers.pop() if answers else pending

    monkeypatch.setattr(OrderedReader, "_create", lagging)
    assert [received.message.text async for received in bus.history("HR_EVENT", where)] == ["a", "b", "c"]
    assert not answers
    nothing = s.EVENT.at(run=token_hex(4), actor="rollout", type="event")
    assert [received async for received in bus.history("HR_EVENT", nothing)] == []
