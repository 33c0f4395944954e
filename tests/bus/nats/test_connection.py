"""Bus against a real broker: publish, expected sequences, claim checks, reading, request and reply."""

import asyncio
import hashlib
import os
from secrets import token_hex

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus, RawMessage
from headrace.bus.errors import (
    BusError,
    BusTimeout,
    CredentialsRefused,
    MessageGone,
    NoBroker,
    NoResponders,
    WrongSequence,
)
from headrace.bus.payloads import claim_checks, retention
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import encode
from headrace.messages.operations import Ack, Event, Ping
from headrace.messages.rollout import ToolResult, TurnDone
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def event(text: str) -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


def subject(role: str = "judge") -> str:
    return s.EVENT.at(run=f"r{token_hex(4)}", actor=role, type="event")


async def test_publish_then_get_last_history(connect: Connect) -> None:
    bus = await connect("judge")
    where = subject()
    seqs = [await bus.publish(where, event(str(n))) for n in range(5)]
    assert seqs == sorted(seqs)
    got = await bus.get("HR_EVENT", seqs[2])
    assert (got.message, got.seq, got.subject, got.stream) == (event("2"), seqs[2], where, "HR_EVENT")
    last = await bus.last("HR_EVENT", where)
    assert last is not None and last.seq == seqs[-1] and last.message == event("4")
    assert abs(last.time - got.time) < 60 and last.time >= got.time
    assert [r.message.text async for r in bus.history("HR_EVENT", where)] == list("01234")
    assert [r.seq async for r in bus.history("HR_EVENT", where, start=seqs[3])] == seqs[3:]
    assert await bus.last("HR_EVENT", subject()) is None


async def test_the_same_id_is_stored_once(connect: Connect) -> None:
    bus = await connect("judge")
    where = subject()
    first = await bus.publish(where, event("x"), msg_id="one-" + where)
    assert await bus.publish(where, event("x"), msg_id="one-" + where) == first
    assert len([r async for r in bus.history("HR_EVENT", where)]) == 1


async def test_expected_sequence_refuses_a_zombie(connect: Connect) -> None:
    bus = await connect("judge")
    where = subject()
    first = await bus.publish(where, event("a"), expect=0)
    second = await bus.publish(where, event("b"), expect=first)
    with pytest.raises(WrongSequence) as caught:
        await bus.publish(where, event("zombie"), expect=first)
    assert caught.value.last == second
    with pytest.raises(WrongSequence):
        await bus.publish(where, event("zombie"), expect=0)


async def test_expected_sequence_over_a_filter(connect: Connect) -> None:
    bus = await connect("judge")
    run = f"r{token_hex(4)}"
    over = s.EVENT.where(run=run)
    first = await bus.publish(
        s.EVENT.at(run=run, actor="judge", type="event"), event("a"), expect=0, expect_filter=over
    )
    other = s.EVENT.at(run=run, actor="judge", type="rejected")
    with pytest.raises(WrongSequence):
        await bus.publish(other, event("b"), expect=0, expect_filter=over)
    assert await bus.publish(other, event("b"), expect=first, expect_filter=over) > first


async def test_a_repeat_of_a_stored_publish_is_no_wrong_sequence(connect: Connect) -> None:
    """The first try was stored and its answer lost: the repeat carries the same id and the same expectation."""
    bus = await connect("judge")
    where = subject()
    first = await bus.publish(where, event("a"), msg_id=where, expect=0)
    assert await bus.publish(where, event("a"), msg_id=where, expect=0) == first
    await bus.publish(where, event("b"), expect=first)
    assert await bus.publish(where, event("a"), msg_id=where, expect=0) == first


@pytest.mark.parametrize("size", [(1 << 20) + 1, 5 << 20])
async def test_claim_check_round_trip(connect: Connect, size: int) -> None:
    bus, admin = await connect("judge"), await connect("admin")
    where, text = subject(), os.urandom(size // 2).hex()
    big = Event(actor="a", id="a-1", kind="big", text=text)
    seq = await bus.publish(where, big)
    received = await bus.get("HR_EVENT", seq)
    assert received.message == big
    assert [r.message async for r in bus.history("HR_EVENT", where)] == [big]
    before = await admin.last_seq("HR_BLOB")
    assert (await bus.get("HR_EVENT", await bus.publish(where, big))).message == big
    assert await admin.last_seq("HR_BLOB") == before, "the same content is not stored twice"


async def test_users_share_no_payload_and_one_purge_finds_all_of_a_users(connect: Connect) -> None:
    rollout, feedback, run = await connect("rollout"), await connect("feedback"), f"r{token_hex(4)}"
    users = [token_hex(10) for _ in range(2)]
    text = os.urandom(1 << 20).hex()
    names = ("g1", *(f"{user}.s1" for user in users))
    held = []
    for name in names:
        done = TurnDone(
            run=run, trajectory=f"{name}-0-0", index=0, results=(ToolResult(call_id="c", ok=True, output=text),)
        )
        start = await feedback.last_seq("HR_BLOB")
        held.append(await rollout.publish(s.TURN.at(run=run, trajectory=done.trajectory), done))
        assert await feedback.last_seq("HR_BLOB") > start, "the same content is stored for each of them"
    assert await feedback.purge("HR_BLOB", subject=f"hr.blob.{users[0]}.>") > 1
    for seq, name in zip(held, names, strict=True):
        record = await rollout.get("HR_TURN", seq)
        if name.startswith(users[0]):
            with pytest.raises(MessageGone):
                _ = record.message
        else:
            assert record.message.results[0].output == text


async def test_records_are_purged_with_their_payloads(connect: Connect) -> None:
    rollout, trainer, operator = await connect("rollout"), await connect("trainer"), await connect("operator")
    run = f"r{token_hex(4)}"
    where = s.TURN.at(run=run, trajectory="g1-0-0")

    def done() -> TurnDone:
        result = ToolResult(call_id="0.0", ok=True, output=os.urandom(1 << 20).hex())
        return TurnDone(run=run, trajectory="g1-0-0", index=0, results=(result,))

    old, newest = await rollout.publish(where, done()), await rollout.publish(where, done())
    assert await retention.purge(trainer, "HR_TURN", where, old) == 0
    assert await retention.purge(trainer, "HR_TURN", where, newest) == 1
    left = [r.headers["Hr-Type"] async for r in rollout.history("HR_TURN", where)]
    assert len(left) == 1
    names = {r.subject.split(".")[2] async for r in operator.records("HR_BLOB")}
    turn = (await rollout.get("HR_TURN", newest)).message
    assert isinstance(turn, TurnDone)
    digest = hashlib.sha256(encode(turn)[0]).hexdigest()
    assert digest in names
    assert await retention.purge(trainer, "HR_TURN", where, newest + 1) == 1
    assert digest not in {r.subject.split(".")[2] async for r in operator.records("HR_BLOB")}


async def test_purge_leaves_gaps_that_readers_pass(connect: Connect) -> None:
    bus, admin = await connect("judge"), await connect("admin")
    run = f"r{token_hex(4)}"
    one = s.EVENT.at(run=run, actor="judge", type="event")
    two = s.EVENT.at(run=run, actor="judge", type="rejected")
    remaining_seqs = []
    for n in range(20):
        if n % 2:
            await bus.publish(two, event(f"two {n}"))
        else:
            remaining_seqs.append(await bus.publish(one, event(f"one {n}")))
    assert await admin.purge("HR_EVENT", subject=two) == 10
    assert [r.seq async for r in bus.history("HR_EVENT", s.EVENT.where(run=run))] == remaining_seqs
    with pytest.raises(MessageGone):
        await bus.get("HR_EVENT", remaining_seqs[0] + 1)
    assert await admin.purge("HR_EVENT", subject=one, before=remaining_seqs[5]) == 5
    assert [r.seq async for r in bus.history("HR_EVENT", one)] == remaining_seqs[5:]
    await admin.purge("HR_EVENT", subject=one)
    assert [r.seq async for r in bus.history("HR_EVENT", one)] == []


async def test_follow_gives_history_then_live(connect: Connect) -> None:
    bus = await connect("judge")
    where = subject()
    for n in range(3):
        await bus.publish(where, event(str(n)))
    seen: list[str] = []
    live = asyncio.Event()

    async def read() -> None:
        async for received in bus.follow("HR_EVENT", where):
            seen.append(received.message.text)
            if len(seen) == 3:
                live.set()
            if len(seen) == 600:
                return

    task = asyncio.create_task(read())
    await asyncio.wait_for(live.wait(), PATIENCE_S)
    for n in range(3, 600):
        await bus.publish(where, event(str(n)))
    await asyncio.wait_for(task, PATIENCE_S)
    assert seen == [str(n) for n in range(600)]


async def test_several_filters_in_one_order(connect: Connect) -> None:
    bus = await connect("judge")
    run = f"r{token_hex(4)}"
    one, two = (s.EVENT.at(run=run, actor="judge", type=kind) for kind in ("event", "rejected"))
    seqs = [await bus.publish(one if n % 3 else two, event(str(n))) for n in range(9)]
    assert [r.seq async for r in bus.history("HR_EVENT", one, two)] == seqs


async def test_request_reply_and_its_errors(connect: Connect) -> None:
    asker, helper = await connect("judge"), await connect("environment")

    async def handler(message: object) -> Ack:
        assert isinstance(message, Ping)
        if message.note == "never":
            await asyncio.Event().wait()
        return Ack(detail=message.note)

    await helper.respond("hr.rpc.environment.judge.ping", handler)
    answer = await asker.request("hr.rpc.environment.judge.ping", Ping(note="hello"))
    assert answer == Ack(detail="hello")
    answers = await asyncio.gather(
        *(asker.request("hr.rpc.environment.judge.ping", Ping(note=str(n))) for n in range(100))
    )
    assert [a.detail for a in answers if isinstance(a, Ack)] == [str(n) for n in range(100)]
    with pytest.raises(BusTimeout):
        await asker.request("hr.rpc.environment.judge.ping", Ping(note="never"), timeout=0.1)
    with pytest.raises(NoResponders):
        await asker.request("hr.rpc.environment.judge.nobody", Ping())


async def test_an_answer_may_come_in_parts_and_its_subject_ends_with_it(connect: Connect) -> None:
    asker, helper = await connect("gateway"), await connect("rollout")
    where = f"hr.rpc.rollout.gateway.turn-{token_hex(4)}"
    replies: list[str] = []

    async def handler(message: object) -> Ack:
        for number in range(100):
            await helper.say(Ping(note=str(number)))
        return Ack(detail="whole")

    async def whole(raw: RawMessage) -> None:
        replies.append(raw.reply)

    await helper.respond(where, handler)
    parts: list[Message] = []
    assert await asker.request(where, Ping(), on_part=parts.append) == Ack(detail="whole")
    assert parts == [Ping(note=str(number)) for number in range(100)]
    assert await asker.request(where, Ping()) == Ack(detail="whole"), "a caller may leave the parts out"

    # A reply subject outlives its answer only until the empty message that ends it.
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(raw: RawMessage) -> None:
        heard.put_nowait(raw.data)

    await helper.listen_raw(silent := f"{where}s", whole)
    await asker.listen_raw(inbox := asker.connection.inbox(), hear)
    await asker.connection.publish_request(silent, b"", inbox)
    while not replies:
        await asker.connection.flush()
        await helper.connection.flush()
    for data in (b"1", b"2", b"", b"3"):
        await helper.connection.send(replies[0], data)
    await helper.connection.flush()
    assert [await heard.get() for _ in range(3)] == [b"1", b"2", b""]
    await asker.connection.flush()
    assert heard.empty()


async def test_a_broker_that_is_down_or_refuses_is_one_sentence(server: Server) -> None:
    with pytest.raises(NoBroker, match=r"^no broker answers at nats://127.0.0.1:1 .*"):
        await Bus.connect("nats://127.0.0.1:1", role="judge", timeout=0.3)
    with pytest.raises(CredentialsRefused, match="role 'judge'"):
        await Bus.connect(server.url, role="judge", credentials=None)
    with pytest.raises(BusError, match="no credentials for role 'nobody'"):
        await Bus.connect(server.url, role="nobody", credentials=server.credentials)


async def test_a_request_over_1_mib_travels_as_a_claim_check(connect: Connect) -> None:
    asking, answering = await connect("judge"), await connect("environment")
    big = Event(actor="a", id="a", kind="k", text=os.urandom(5 << 20).hex())

    async def digest(message: Message) -> Message:
        assert isinstance(message, Event)
        return Ack(detail=hashlib.sha256(message.text.encode()).hexdigest())

    await answering.respond("hr.rpc.environment.judge.digest", digest)
    answer = await asking.request("hr.rpc.environment.judge.digest", big)
    assert answer == Ack(detail=hashlib.sha256(big.text.encode()).hexdigest())


async def test_an_answer_may_repeat_the_content_of_its_request(connect: Connect) -> None:
    asking, answering = await connect("judge"), await connect("environment")
    big = Event(actor="a", id="a", kind="k", text=token_hex(2 << 20))

    async def echo(message: Message) -> Message:
        return message

    await answering.respond("hr.rpc.environment.judge.echo", echo)
    answers = await asyncio.gather(
        *(asking.request("hr.rpc.environment.judge.echo", big, timeout=PATIENCE_S) for _ in "ab")
    )
    assert answers == [big, big]
    while answering._answering:  # the answer is sent, its task ends in one of the next turns
        await asyncio.sleep(0)


async def test_the_payloads_of_requests_and_answers_expire(connect: Connect) -> None:
    """No record refers to them, so nothing else deletes them. A record with the same content keeps its own."""
    asking, answering, operator = await connect("rollout"), await connect("environment"), await connect("operator")
    user, big = token_hex(10), Ack(detail=os.urandom(1 << 20).hex())

    async def echo(message: Message) -> Message:
        return message

    await answering.respond("hr.rpc.environment.rollout.echo", echo)
    before = await operator.last_seq("HR_BLOB")
    for owner in ("", user):
        assert await asking.request("hr.rpc.environment.rollout.echo", big, timeout=PATIENCE_S, owner=owner) == big
    stored_blob = await asking.put_blob(big)
    lives = {
        r.subject.split(".")[2].partition("-")[0]: r.headers.get("Nats-TTL")
        async for r in operator.records("HR_BLOB", start=before + 1)
    }
    assert lives == {"for3600": "7200s", user: "7200s", stored_blob.sha256: None}

    payload, headers = encode(big)
    short = await claim_checks.put(asking._store_chunk, payload, headers, lives_s=1)
    async with asyncio.timeout(PATIENCE_S):
        while await operator.subjects("HR_BLOB", f"hr.blob.{short.sha256.partition('.')[0]}.>"):
            await asyncio.sleep(0.25)
    assert await asking.get_blob(stored_blob) == big


async def test_payloads_of_records_that_the_broker_deletes_expire(connect: Connect) -> None:
    """The broker deletes a record by age or once it is handled; no purge then finds its payload."""
    admin = await connect()
    big = Event(kind="test", text=os.urandom(1 << 20).hex(), run="r1", actor="a", id="a-1")
    event = s.EVENT.at(run="r1", actor="a", type="event")
    for where, name, lives_s in (
        (event, "for1209600", 15 * 86400),
        (s.TASK.at(run="r1", lane="train", suite="s"), "for5184000", 61 * 86400),
        (s.STEP.at(run="r1"), "", None),
    ):
        before = await admin.last_seq("HR_BLOB")
        await admin.publish(where, big)
        chunks = [r async for r in admin.records("HR_BLOB", start=before + 1)]
        assert len(chunks) == 3 and all(r.subject.split(".")[2].startswith(name) for r in chunks)
        assert {r.headers.get("Nats-TTL") for r in chunks} == {None if lives_s is None else f"{lives_s}s"}
    assert [r.message async for r in admin.history("HR_EVENT", event)] == [big]


async def test_an_answer_that_cannot_be_stored_is_an_answer_too(connect: Connect) -> None:
    """The scavenger may not write blobs; its asker waited for the whole of its deadline."""
    asking, answering = await connect("operator"), await connect("scavenger")

    async def large(message: Message) -> Message:
        return Ack(detail=token_hex(2 << 20))

    await answering.respond("hr.rpc.scavenger.operator.n1.ping", large)
    answer = await asking.request("hr.rpc.scavenger.operator.n1.ping", Ping(), timeout=PATIENCE_S)
    assert isinstance(answer, Ack) and not answer.ok and "may not publish on hr.blob." in answer.detail


async def test_a_closed_connection_leaves_no_answer_running(connect: Connect) -> None:
    asking, answering = await connect("judge"), await connect("environment")
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless(message: Message) -> Message:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("nothing wakes it")

    await answering.respond("hr.rpc.environment.judge.endless", endless)
    request = asyncio.create_task(asking.request("hr.rpc.environment.judge.endless", Ping(), timeout=3600))
    await began.wait()
    await answering.close()
    assert ended.is_set() and not answering._answering
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
