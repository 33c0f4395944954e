"""An attacker with the seed of a role brings about nothing outside of the role's row: every subject, request, header,
reply and delivery subject is tried against a real broker (tests/support/arena.py)."""

import itertools
from collections.abc import AsyncIterator, Iterator
from secrets import token_hex

import pytest

from headrace.bus.broker import permissions
from headrace.bus.broker.permissions import NAMES
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.codec import encode
from headrace.messages.operations import Ack, Ping
from tests.conftest import Connect
from tests.support.arena import CANARY, USUAL, Arena, Sent, arena, concrete, consumer, places, requests, row

pytestmark = pytest.mark.anyio
HEADERS: tuple[dict[str, str], ...] = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-TTL": "1s"},
    {"Nats-Incr": "+1"},
    {"Nats-Schedule": "@at 2020-01-01T00:00:00Z"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {"Nats-Marker-Reason": "Purge", "KV-Operation": "PURGE"},
    {"Nats-Expected-Stream": "HR_STEP"},
    {"Nats-Stream-Source": "HR_STEP 1 > >"},
    {"Nats-Request-Info": '{"acc":"HR_STEP","svc":"HR_STEP"}'},
)
"""Headers by which the broker would do more than store a message where it was sent."""
NUMBERS = itertools.count()
"""Of consumers, so that none has the name of another."""


@pytest.fixture(scope="module")
async def battle(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    async with arena(tmp_path_factory.mktemp("arena")) as made:
        yield made


def foreign(role: str) -> list[str]:
    """Places that an attack may name. A role may send its own requests to the broker in this way too."""
    return [place for place in places() if not (place.startswith("$JS.") and row(role, place))]


def asks(role: str) -> list[Sent]:
    """Requests of a role that somebody answers: a record, every kind of read, every call."""
    allowed = [concrete(name) for name in permissions.of(role).publish]
    records = [Sent(name) for name in allowed if s.stream_of(name) is not None or name.startswith("$KV.")]
    # A purge below sequence 1 is answered and removes nothing.
    reads = [Sent(name, payload=b'{"seq":1}') for name in allowed if ".GET." in name or ".PURGE." in name]
    reads += [Sent(name) for name in allowed if ".INFO" in name]
    calls = [Sent(name) for name in allowed if name.startswith("hr.rpc.")]
    return [*records, *reads, *calls]


def by_kind(role: str) -> list[Sent]:
    """A record, and a read whose answer is a record: the strongest of `asks`."""
    every = asks(role)
    return [every[0], next(one for one in every if ".DIRECT.GET." in one.subject)]


def with_replies(role: str, chosen: list[Sent]) -> Iterator[Sent]:
    for one, target in itertools.product(chosen, foreign(role)):
        yield one._replace(reply=target)


def with_headers(role: str, targets: list[str]) -> Iterator[Sent]:
    for one in asks(role):
        if s.stream_of(one.subject) is not None or one.subject.startswith("$KV."):
            yield from (one._replace(headers=headers, reply=f"_INBOX.{role}.x.1") for headers in HEADERS)
    for target in targets:
        yield by_kind(role)[0]._replace(headers={"Nats-Trace-Dest": target})
        yield by_kind(role)[0]._replace(headers={"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": target})


def with_deliveries(streams: list[str], targets: list[str]) -> Iterator[Sent]:
    """Consumers that deliver the last record to a place, and heartbeats without one. Consumers of the same stream are
    no targets: a role that may make consumers there may delete and reset others."""
    for stream, target in itertools.product(streams, targets):
        of_consumers = target.startswith(("$JS.API.CONSUMER.", "$JS.ACK.")) and f".{stream}." in target
        if not of_consumers:
            yield consumer(stream, f"e{next(NUMBERS)}", target)
            yield consumer(stream, f"e{next(NUMBERS)}", target, idle_heartbeat=10**8)


def consumed(role: str) -> list[str]:
    """The streams on which a role may make consumers."""
    return [stream for stream in NAMES if row(role, f"$JS.API.CONSUMER.CREATE.{stream}.x")]


def few(role: str) -> list[str]:
    """One place of each kind."""
    return list({tuple(place.split(".")[:4]): place for place in foreign(role)}.values())


@pytest.mark.parametrize("role", USUAL)
async def test_a_seed_opens_its_row_alone(battle: Arena, role: str) -> None:
    attacks = [map(Sent, foreign(role)), with_replies(role, by_kind(role)), with_headers(role, [*TARGETS])]
    count, breaches = await battle.attack(role, itertools.chain(*attacks))
    assert (breaches, count > 1000) == ([], True)


TARGETS = (
    *("hr.step.forged", "hr.score.x.x.x", "$KV.HR_PRODUCT.x", "hr.rpc.environment.judge.x.call", "_INBOX.judge.x.1"),
    *("$JS.API.STREAM.PURGE.HR_STEP", "$JS.ACK.HR_TASK.canary.1.1.1.1.0", "hr.beat.trainer.x", "hr.new.x"),
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.HR_TASK.x",
)


@pytest.mark.parametrize("stream", NAMES)
async def test_no_consumer_delivers_beyond_its_stream(battle: Arena, stream: str) -> None:
    role = next((role for role in USUAL if stream in consumed(role)), "")
    assert role
    about = [f"$JS.API.{verb}" for verb in requests(stream)]
    targets = [target for target in (*TARGETS, *about) if not row(role, target)]
    count, breaches = await battle.attack(role, with_deliveries([stream], targets))
    assert (breaches, count > 20) == ([], True)


@pytest.mark.slow
@pytest.mark.parametrize("role", USUAL)
async def test_every_request_with_every_reply(battle: Arena, role: str) -> None:
    every = itertools.chain(with_replies(role, asks(role)), with_headers(role, foreign(role)))
    assert (await battle.attack(role, every))[1] == []
    assert (await battle.attack(role, with_deliveries(consumed(role), few(role))))[1] == []


async def test_the_arena_notices_breaches(battle: Arena) -> None:
    """The same checks, for a sender that may do all of it."""
    sent = [Sent("hr.step.forged"), Sent("hr.rpc.environment.judge.x.call")]
    sent.append(Sent(f"$JS.ACK.HR_SCORE.{CANARY}.1.1.1.1.0", payload=b""))
    breaches = set((await battle.attack("admin", sent, as_if="search"))[1])
    assert {"HR_STEP: hr.step.forged", "HR_SCORE: consumer"} <= breaches
    assert "environment heard hr.rpc.environment.judge.x.call" in breaches


async def test_a_chunk_of_a_payload_cannot_be_replaced(connect: Connect) -> None:
    rollout, judge = await connect("rollout"), await connect("judge")
    where = f"hr.blob.{token_hex(32)}.0"
    await rollout.connection.call(where, b"true")
    refused = await judge.connection.call(where, b"forged")
    assert b"maximum messages per subject exceeded" in refused.data
    assert (await judge.connection.call(f"$JS.API.DIRECT.GET.HR_BLOB.{where}")).data == b"true"


async def test_a_service_answers_callers_alone(connect: Connect) -> None:
    """With another reply subject its answer would be a publish in its own name: here on its own events."""
    environment, rollout = await connect("environment"), await connect("rollout")
    where, target = "hr.rpc.environment.rollout.x.call", f"hr.event.r{token_hex(4)}.environment.event"
    asked: list[Message] = []

    async def answer(message: Message) -> Message:
        asked.append(message)
        return Ack()

    await environment.respond(where, answer)
    payload, headers = encode(Ping())
    await environment.connection.client.publish(where, payload, target, headers)
    await environment.connection.flush()
    assert await rollout.request(where, Ping()) == Ack()
    assert len(asked) == 1 and await environment.tail("HR_EVENT", target) == 0


def test_the_page_publishes_nothing() -> None:
    assert permissions.of(permissions.WEB_ROLE).publish == ()
