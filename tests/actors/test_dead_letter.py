"""A message that nobody can handle becomes a dead letter, also when no dead-letter actor ran at that moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import pytest

from headrace.actors.dead_letter import DeadLetter as DeadLetterActor
from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone, Reject
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.config import Rollout as RolloutSection
from headrace.ledger import lost_attempts
from headrace.messages.codec import decode
from headrace.messages.operations import Advisory, DeadLetter, Heartbeat, Rejected
from headrace.messages.rollout import RolloutRequest, Trajectory
from headrace.messages.subjects import DLQ, TASK, TRAJ
from tests.conftest import Connect
from tests.support import records
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
T = TypeVar("T")


class Refusing(Actor):
    """A consumer whose handlers refuse or fail."""

    role = "rollout"

    async def refuse(self, received: Received[RolloutRequest]) -> None:
        raise Reject("no such task")

    async def stumble(self, received: Received[RolloutRequest]) -> None:
        raise RuntimeError("bad day")


def request(group: str) -> RolloutRequest:
    return RolloutRequest(run=records.RUN, lane="train", group=group, slot=1, attempt=0, task=records.TASK, seed=1)


async def ask(bus: Bus, group: str) -> int:
    asked = request(group)
    where = TASK.at(run=records.RUN, lane="train", suite="s")
    return await bus.publish(where, asked, msg_id=f"{records.RUN}.{asked.trajectory}")


async def letter(bus: Bus, group: str) -> DeadLetter:
    async for received in bus.follow("HR_DLQ", DLQ.where()):
        attempt = lost_attempts.lost_attempt(received.message)
        if attempt is not None and attempt.group == group:
            assert isinstance(received.message, DeadLetter)
            return received.message
    raise AssertionError


async def soon(what: Awaitable[T]) -> T:
    """Wait with a time limit."""
    async with asyncio.timeout(PATIENCE_S):
        return await what


async def empty(bus: Bus, seq: int) -> bool:
    """Whether the work queue has removed a message."""
    try:
        await bus.get("HR_TASK", seq)
    except MessageGone:
        return True
    return False


@contextlib.asynccontextmanager
async def hands(bus: Bus, handler: str, deliveries: int = 2) -> AsyncIterator[None]:
    actor = Refusing(Config(), bus, records.RUN, bus.id)
    await actor.consume(
        TASK,
        getattr(actor, handler),
        durable=f"rollout-{records.RUN}-train",
        filter=TASK.where(run=records.RUN, lane="train"),
        max_deliver=deliveries,
        backoff=(0.01,),
    )
    yield
    await actor.shut(1)


async def test_rejected_work_becomes_a_letter_that_names_the_attempt(connect: Connect) -> None:
    admin = await connect()
    async with living(DeadLetterActor, Config(), await connect("dead_letter"), records.RUN):
        seq = await ask(admin, "g000001")
        async with hands(await connect("rollout"), "refuse"):
            dead_letter = await soon(letter(admin, "g000001"))
    assert dead_letter.reason == "no such task"
    assert dead_letter.stream_seq == seq
    assert decode(dead_letter.payload, dead_letter.headers) == request("g000001")
    assert lost_attempts.lost_attempt(dead_letter) == lost_attempts.LostAttempt(records.RUN, "g000001", 1, 0)
    assert await empty(admin, seq)


async def test_an_actor_that_was_down_finds_the_notice_later(connect: Connect) -> None:
    admin = await connect()
    seq = await ask(admin, "g000002")
    told = asyncio.Event()
    async with hands(await connect("rollout"), "stumble"):

        async def watch() -> None:
            async for received in admin.follow("HR_ADVISORY"):
                if received.message.stream_seq == seq:
                    told.set()

        watcher = asyncio.create_task(watch())
        await soon(told.wait())
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    async with living(DeadLetterActor, Config(), await connect("dead_letter"), records.RUN):
        dead_letter = await soon(letter(admin, "g000002"))
    assert "bad day" in dead_letter.reason
    assert dead_letter.deliveries == 2
    assert await empty(admin, seq)


class Killed(DeadLetterActor):
    """Dies after it received the notice and before it handled it."""

    took: asyncio.Event

    async def _on_notice(self, received: Received[Advisory | Rejected]) -> None:
        received.settled = True
        self.took.set()


async def test_the_next_actor_writes_what_a_killed_one_held(connect: Connect) -> None:
    admin = await connect()
    first = Killed(Config(), await connect("dead_letter"), records.RUN, "killed")
    first.took = asyncio.Event()
    await first.start()
    seq = await ask(admin, "g000005")
    async with hands(await connect("rollout"), "refuse"), asyncio.timeout(PATIENCE_S):
        await first.took.wait()
    await first.shut(1)
    async with (
        living(DeadLetterActor, Config(), await connect("dead_letter"), records.RUN),
        asyncio.timeout(PATIENCE_S),
    ):
        dead_letter = await letter(admin, "g000005")
    assert dead_letter.command == f"headrace dlq {records.RUN} --retry HR_TASK/rollout-{records.RUN}-train/{seq}"


async def test_a_message_that_ran_out_of_deliveries_leaves_the_queue(connect: Connect) -> None:
    """No consumer rejected the message: its consumer died. Only the broker reports it, and would keep the message for
    ever."""
    admin = await connect()
    seq = await ask(admin, "g000003")
    bus = await connect("rollout")
    hung = asyncio.Event()

    class Dying(Refusing):
        async def die(self, received: Received[RolloutRequest]) -> None:
            received.settled = True  # as if the process had been killed
            hung.set()

    actor = Dying(Config(), bus, records.RUN, bus.id)
    await actor.consume(
        TASK,
        actor.die,
        durable=f"rollout-{records.RUN}-train",
        filter=TASK.where(run=records.RUN, lane="train"),
        ack_wait=0.2,
        max_deliver=1,
    )
    async with living(DeadLetterActor, Config(), await connect("dead_letter"), records.RUN):
        await soon(hung.wait())
        dead_letter = await soon(letter(admin, "g000003"))
        await actor.shut(1)
    assert dead_letter.reason == "not settled in 1 deliveries"
    assert decode(dead_letter.payload, dead_letter.headers) == request("g000003")
    assert await empty(admin, seq)


async def test_a_stream_that_is_kept_keeps_the_message(connect: Connect) -> None:
    """A Trajectory that the judge cannot read ends its attempt, known by the message id alone."""
    admin = await connect()
    where = TRAJ.at(run=records.RUN, group="g000004")
    headers = {"Hr-Type": "trajectory/1"}
    seq = await admin.publish_raw(where, b"\xc1", headers, msg_id=f"{records.RUN}.g000004-1-0")
    bus = await connect("judge")

    class Judge(Actor):
        role = "judge"

        async def never(self, received: Received[Trajectory]) -> None:
            raise AssertionError("it cannot be read")

    actor = Judge(Config(), bus, records.RUN, bus.id)
    await actor.consume(TRAJ, actor.never, durable=f"judge-{records.RUN}", max_deliver=1)
    async with living(DeadLetterActor, Config(), await connect("dead_letter"), records.RUN):
        dead_letter = await soon(letter(admin, "g000004"))
        await actor.shut(1)
    assert "not a readable trajectory" in dead_letter.reason
    assert lost_attempts.lost_attempt(dead_letter) == lost_attempts.LostAttempt(records.RUN, "g000004", 1, 0)
    assert (await admin.get("HR_TRAJ", seq)).data == b"\xc1"


async def test_requests_end_when_no_rollout_actor_is_alive(connect: Connect) -> None:
    """A live one, also of no particular run, keeps them in the queue; another run's does not."""
    admin, settings = await connect(), Config(rollout=RolloutSection(wait_s=0.4))
    rollout = await connect("rollout")
    presence = await rollout.kv("HR_PRESENCE")

    async def beat(run: str) -> None:
        alive = Heartbeat(actor="rollout", id="r", node="n", pid=1, state="running", run=run)
        await presence.put("rollout.r", alive)

    seq = await ask(admin, "g000011")
    await beat(records.RUN)
    looks = asyncio.Semaphore(0)

    class Counting(DeadLetterActor):
        async def _end_unpulled(self) -> None:
            await super()._end_unpulled()
            looks.release()

    async with living(Counting, settings, await connect("dead_letter"), records.RUN):
        for _ in range(8):  # twice as long as the limit
            await soon(looks.acquire())
        assert not await empty(admin, seq)
        await beat("another")
        dead_letter = await soon(letter(admin, "g000011"))
    assert f"no rollout actor of run {records.RUN} was alive for 0.4 s" in dead_letter.reason
    assert lost_attempts.lost_attempt(dead_letter) == lost_attempts.LostAttempt(records.RUN, "g000011", 1, 0)
    assert await empty(admin, seq)
