"""The private members of nats-py that the bus uses exist in the installed version, and late pongs do no harm."""

import asyncio

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from headrace.bus.nats.client import PRIVATE, NatsClient, parse_headers
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
