"""Another role cannot make a record vanish: not by using its message id first, nor by storing other bytes under its
payload's name. With a real broker; the other role has the admin's permissions."""

from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Any

import msgspec
import pytest

from headrace.bus import signatures
from headrace.bus.broker import keys
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, CorruptPayload
from headrace.bus.payloads import claim_checks
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import encode
from headrace.messages.operations import BlobRef, Event
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.rollout import Trajectory
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio


@pytest.fixture
async def other(server: Server) -> AsyncIterator[Bus]:
    """A connection of another role that may publish everywhere, as itself."""
    async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as bus:
        yield bus


async def raw(bus: Bus, subject: str, payload: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """The broker's answer to a publish."""
    answer: dict[str, Any] = msgspec.json.decode((await bus.connection.call(subject, payload, headers=headers)).data)
    return answer


async def test_a_message_id_that_another_role_used_first_loses_nothing(
    server: Server, connect: Connect, other: Bus
) -> None:
    """Ids are shared by all subjects of a stream. The name is easy to guess; the id itself takes the writer's seed."""
    judge, run = await connect("judge"), f"r{token_hex(4)}"
    where, score = s.SCORE.at(run=run, judge="j1", group="g1"), records.score("g1", run=run)
    key = keys.load(server.credentials, "judge")
    assert key is not None
    elsewhere, (payload, headers) = s.CLOSE.at(run=run, group="g1"), encode(records.dropped("g1", run=run))
    for id in ("guessed", signatures.message_id(key.seed, where, "stolen")):
        assert "error" not in await raw(other, elsewhere, payload, headers | {"Nats-Msg-Id": id})
    guessed = await judge.publish(where, score, msg_id="guessed")
    stolen = await judge.publish(where, records.score("g1", 1, run=run), msg_id="stolen")
    stored = {received.seq: received.message.slot async for received in judge.history("HR_SCORE", where)}
    assert stored == {guessed: 0, stolen: 1}


async def test_a_repetition_is_stored_once_by_any_actor_of_the_role(connect: Connect) -> None:
    first, second, run = await connect("judge"), await connect("judge"), f"r{token_hex(4)}"
    where, score = s.SCORE.at(run=run, judge="j1", group="g1"), records.score("g1", run=run)
    seq = await first.publish(where, score, msg_id="one")
    assert await second.publish(where, score, msg_id="one") == seq
    assert [received.seq async for received in first.history("HR_SCORE", where)] == [seq]


async def test_the_name_of_a_message_travels_beside_its_id(connect: Connect) -> None:
    """Resumed attempts and dead letters find an attempt by its name."""
    rollout, where = await connect("rollout"), s.TRAJ.at(run=records.RUN, group="g1")
    seq = await rollout.publish(where, records.trajectory(records.issued("g1")), msg_id="named.g1-0-0")
    headers = (await rollout.get("HR_TRAJ", seq)).headers
    assert headers[signatures.ID_HEADER] == "named.g1-0-0" and "named" not in headers["Nats-Msg-Id"]


def attempt(group: str) -> Trajectory:
    """A trajectory over 1 MiB."""
    return msgspec.structs.replace(records.trajectory(records.issued(group)), diff={"a": token_hex(700_000).encode()})


def large(text: str) -> Event:
    """A message over 1 MiB."""
    return Event(actor="a", id="a", kind="k", text=text + token_hex(700_000))


async def test_other_bytes_under_a_payloads_name_are_told_to_its_writer(connect: Connect, other: Bus) -> None:
    rollout, message = await connect("rollout"), attempt("g1")
    payload, headers = encode(message)
    ref = await claim_checks.put(_nowhere, payload, headers)
    assert "error" not in await raw(other, claim_checks.place(ref.sha256, 1), b"other bytes", {"Nats-Msg-Id": "x"})
    with pytest.raises(CorruptPayload, match="another content"):
        await rollout.publish(s.TRAJ.at(run=records.RUN, group="g1"), message)


async def _nowhere(subject: str, chunk: bytes, msg_id: str, lives_s: int) -> int:
    return 1


async def test_equal_payloads_share_their_chunks(connect: Connect) -> None:
    judge, message, where = await connect("judge"), large("twice"), s.EVENT.at(run="r", actor="judge", type="event")
    twice = [await judge.publish(where, message) for _ in range(2)]
    assert [(await judge.get("HR_EVENT", seq)).message for seq in twice] == [message, message]


@pytest.mark.parametrize("whose", ["nobody's", "a user's", "a user's that expires"])
async def test_a_replaced_payload_is_never_read(connect: Connect, other: Bus, whose: str) -> None:
    user = token_hex(8)
    message: Message
    if whose == "nobody's":
        bus, where, message = await connect("judge"), s.EVENT.at(run="r", actor="judge", type="event"), large(user)
    elif whose == "a user's":
        bus, where = await connect("rollout"), s.TRAJ.at(run=records.RUN, group=f"{user}.g1")
        message = attempt(f"{user}.g1")
    else:
        bus, where = await connect("gateway"), s.FEEDBACK.at(tenant="t", user=user)
        message = UserFeedback(user=user, run="r", trajectory=f"{user}.g1-0-0", thumb="up", tenant="t",
                               training_allowed=True, comment=token_hex(700_000))  # fmt: skip
    stream = s.stream_of(where)
    assert stream is not None
    seq = await bus.publish(where, message)
    assert (await bus.get(stream.name, seq)).message == message
    [stored] = [record async for record in bus.records(stream.name, where) if record.seq == seq]
    ref = msgspec.msgpack.decode(stored.data, type=BlobRef)
    assert ref.keyed == (whose != "nobody's") and bool(ref.expiry) == (whose == "a user's that expires")
    chunk = claim_checks.place(ref.sha256, 0)
    content = await claim_checks.chunk(bus.connection, chunk)
    answer = await raw(other, chunk, content[:-1] + bytes([content[-1] ^ 1]), {"Nats-Msg-Id": "y" + user})
    again = await bus.get(stream.name, seq)
    if "error" in answer:  # the stream takes one message for each subject
        assert again.message == message
    else:
        assert not bus.readable(again) and isinstance(again.error, CorruptPayload)


async def test_signing_takes_a_seed(connect: Connect, server: Server) -> None:
    bus = await connect("trainer")
    bus.key_of = lambda subject, kind: None
    with pytest.raises(BusError, match="has to be signed"):
        await bus.publish(s.STEP.at(run="r"), records.step_failed(0, ["g1"], 1, run="r"))
