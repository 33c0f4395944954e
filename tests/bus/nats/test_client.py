"""The private members of nats-py that the bus uses exist in the installed version, and late pongs do no harm."""

import asyncio

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from headrace.bus.errors import BusError
from headrace.bus.nats.client import PRIVATE, NatsClient, parse_headers
from headrace.bus.nats.connection import PART_HEADER
from headrace.messages import subjects as s
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


async def test_the_installed_nats_py_has_every_private_member() -> None:
    client = Client()
    await asyncio.sleep(0)
    transport = TcpTransport()  # type: ignore[no-untyped-call]
    instances = {Client: client, Subscription: Subscription(client), TcpTransport: transport}
    # _public_nkey and _pongs are attributes of instances, so instances are asked and not the classes.
    missing = {
        cls.__name__: [name for name in names if not hasattr(instances[cls], name)] for cls, names in PRIVATE.items()
    }
    assert missing == {"Client": [], "Subscription": [], "TcpTransport": []}


async def test_a_pong_after_its_flush_timed_out_does_not_end_the_read_loop(connect: Connect) -> None:
    connection = (await connect("judge")).connection
    client = connection.client
    late: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    late.cancel()
    await client._send_ping(late)  # as a flush that timed out leaves it: expected, and cancelled
    await connection.flush()
    assert (await connection.api("INFO")).startswith(b"{"), "the connection no longer hears the broker"
    assert isinstance(client, NatsClient) and not client._pongs


def test_headers_of_a_stored_message() -> None:
    assert parse_headers(b"NATS/1.0\r\nHr-Type: event/1\r\nX: \xff\r\n\r\n") == {"Hr-Type": "event/1", "X": "\ufffd"}
    assert parse_headers(b"") == {}


async def test_a_header_cannot_add_another_header_or_a_command(connect: Connect) -> None:
    sender, reader = (await connect("judge")).connection, (await connect("operator")).connection
    heard: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        await heard.put(message.headers)

    where = s.METRIC.at(actor="judge")
    await reader.subscribe(where, hear)
    await sender.send(where, b"1", {"A": "one\r\nB: two", "C": "\u00fc"})
    await sender.send(where, b"2", {"A": "one\nPUB x 0"})
    await sender.send(where, b"3", {"A": "one", "C": "\u00fc"})
    got = [await heard.get() for _ in range(3)]
    assert got == [{"A": "one  B: two", "C": "\u00fc"}, {"A": "one PUB x 0"}, {"A": "one", "C": "\u00fc"}]
    for name in ("A: b\r\nC", "", "A b"):
        try:
            await sender.send(where, b"4", {name: "x", "A": "last"})
        except BusError:
            continue
        assert await heard.get() == {"A": "last"}


async def test_a_part_of_an_answer_that_breaks_its_handler_does_not_end_the_connection(connect: Connect) -> None:
    asker, service = (await connect("gateway")).connection, (await connect("rollout")).connection

    async def answer(message: Msg) -> None:
        await service.send(message.reply, b"part", {PART_HEADER: "1"})
        await service.send(message.reply, b"whole")

    where = s.RPC.at(service="rollout", caller="gateway", method="turn-r1")
    await service.subscribe(where, answer)
    told: list[str] = []
    asker.on_error.append(told.append)

    def broken(message: Msg) -> None:
        raise LookupError("broken")

    assert (await asker.call(where, b"", on_part=broken)).data == b"whole"
    assert (await asker.api("INFO")).startswith(b"{")
