"""The durable that hundreds of actors pull from."""

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.bus.nats.consumer import Consumer
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.delivery import DeliveryHandler
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.rollout import RolloutRequest
from tests.conftest import Connect
from tests.support import records
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

INPUT = s.EVENT.at(run="r1", actor="operator", type="event")
BURST = 20_000
"""Pull requests at once: the broker usually has not read them all when the subscription ends."""
OTHERS = 600
"""Other actors that pull from the same durable."""


class Puller(Actor):
    """Pulls one event at a time."""

    role: ClassVar[str] = "admin"

    async def start(self) -> None:
        self.texts: asyncio.Queue[str] = asyncio.Queue()
        await self.consume(s.EVENT, self.handle, durable=self.id, filter=INPUT)

    async def handle(self, received: Received[Event]) -> None:
        self.texts.put_nowait(received.message.text)


async def publish(bus: Bus, text: str) -> None:
    await bus.publish(INPUT, Event(actor="operator", id="o", run="r1", kind="k", level="info", text=text))


async def info(bus: Bus, durable: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(await bus.connection.api(f"CONSUMER.INFO.HR_EVENT.{durable}"))
    return answer


async def test_more_than_512_actors_wait_at_one_durable(connect: Connect) -> None:
    bus, others = await connect("admin"), await connect("admin")
    async with living(Puller, Config(), bus, "r1", "crowded") as puller:
        statuses: list[str] = []

        async def refused(raw: Any) -> None:
            statuses.append((raw.headers or {}).get("Status", ""))

        await others.connection.subscribe("_INBOX.admin.others.*", refused, unbounded=True)
        request = msgspec.json.encode({"batch": 1, "expires": 60_000_000_000})
        for number in range(OTHERS):
            where = "$JS.API.CONSUMER.MSG.NEXT.HR_EVENT.crowded"
            await others.connection.publish_request(where, request, f"_INBOX.admin.others.{number}")
        async with asyncio.timeout(PATIENCE_S):
            while (await info(bus, "crowded"))["num_waiting"] + len(statuses) < OTHERS + 1:
                await asyncio.sleep(0.01)
        assert statuses == []
        assert puller.texts.empty()


async def test_a_durable_that_an_earlier_version_made_is_opened(connect: Connect) -> None:
    bus = await connect("admin")
    config = {
        "durable_name": "earlier",
        "name": "earlier",
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "max_waiting": 512,
        "filter_subject": INPUT,
    }
    await bus.connection.api(f"CONSUMER.CREATE.HR_EVENT.earlier.{INPUT}", {"stream_name": "HR_EVENT", "config": config})
    async with living(Puller, Config(), bus, "r1", "earlier") as puller:
        await publish(bus, "hello")
        async with asyncio.timeout(PATIENCE_S):
            assert await puller.texts.get() == "hello"
    assert (await info(bus, "earlier"))["config"]["max_waiting"] == 512


async def test_a_pull_that_the_broker_reads_late_takes_no_message(connect: Connect) -> None:
    """An actor stops while its requests still wait in the broker's queue. A message that is published after that is the
    next actor's."""
    admin, stopped = await connect("admin"), await connect("rollout")
    asked = RolloutRequest(run=records.RUN, lane="train", group="g0", slot=1, attempt=0, task=records.TASK, seed=1)
    durable = f"rollout-{records.RUN}-late"
    filter = s.TASK.where(run=records.RUN, lane="train")

    async def consumer(bus: Bus, handled: asyncio.Queue[str]) -> Consumer:
        async def handle(received: Received[Any]) -> None:
            handled.put_nowait(received.message.group)

        delivery = DeliveryHandler(bus, handle, durable=durable)
        return await Consumer(bus, "HR_TASK", [filter], delivery, durable=durable, ack_wait=3600).open()

    first = await consumer(stopped, asyncio.Queue())
    while not first._asked:
        await asyncio.sleep(0)
    for _ in range(BURST):
        await first._ask(1)
    await first.stop()
    await admin.publish(s.TASK.at(run=records.RUN, lane="train", suite="s"), asked)
    handled = asyncio.Queue[str]()
    second = await consumer(await connect("rollout"), handled)
    async with asyncio.timeout(PATIENCE_S):
        assert await handled.get() == "g0"
    await second.stop()
