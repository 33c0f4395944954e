"""TLS to a real broker: only a broker that the credentials folder vouches for is used, also after a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from headrace.bus.broker import regions
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from tests.support.patience import PATIENCE_S
from tests.support.region_brokers import free_port

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def broker(folder: Path, authority: trustme.CA, *hosts: str, clients: bool = False) -> AsyncIterator[Server]:
    """A broker with a certificate for these hosts; with `clients` it requires one of every client."""
    credentials = folder / "credentials"
    credentials.mkdir(parents=True)
    certificate = authority.issue_cert(*hosts)
    certificate.private_key_pem.write_to_path(credentials / "server.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(credentials / "server.pem", append=True)
    if clients:
        authority.cert_pem.write_to_path(credentials / "clients.pem")
    async with Server(folder) as server:
        yield server


async def refusal(server: Server) -> str:
    with pytest.raises(BusError) as refused:
        await Bus.connect(server.url, role="admin", credentials=server.credentials, timeout=PATIENCE_S)
    return str(refused.value)


async def test_actors_speak_tls_and_come_back_after_a_restart(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with broker(tmp_path, authority, "127.0.0.1") as server:
        assert "no TLS connection" in (said := await refusal(server)) and "this machine's authorities" in said
        trustme.CA().cert_pem.write_to_path(server.credentials / "ca.pem")
        assert "checked against ca.pem" in await refusal(server), "of another authority"
        authority.cert_pem.write_to_path(server.credentials / "ca.pem")
        async with await Bus.connect(
            server.url, role="admin", credentials=server.credentials, timeout=PATIENCE_S
        ) as admin:
            await declare(admin)
            event = Event(actor="judge", id="j1", run="r1", kind="test")
            where = s.EVENT.at(run="r1", actor="judge", type="event")
            await admin.publish(where, event)
            await server.kill()
            await server.start()
            await admin.publish(where, event, msg_id="again")
            assert [received.message async for received in admin.history("HR_EVENT", where)] == [event, event]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert b'"tls_required":true' in await reader.readline()
        writer.write(b'CONNECT {"verbose":true}\r\nPING\r\n')
        assert b"PONG" not in await reader.read(), "a client without TLS is cut"
        writer.close()


async def test_a_certificate_of_another_host_and_a_broker_without_tls_are_refused(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with broker(tmp_path / "tls", authority, "elsewhere.example") as server:
        authority.cert_pem.write_to_path(server.credentials / "ca.pem")
        assert "127.0.0.1" in await refusal(server)
    async with Server(tmp_path / "plain") as server:
        authority.cert_pem.write_to_path(server.credentials / "ca.pem")
        assert "the broker offers no TLS" in await refusal(server)
        (server.credentials / "ca.pem").write_text("no certificate")
        assert "expected PEM" in await refusal(server)


async def test_a_region_reaches_its_hub_by_tls(tmp_path: Path) -> None:
    authority = trustme.CA()

    def certify(folder: Path) -> None:
        folder.mkdir(parents=True)
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(folder / "server.key")
        certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
        authority.cert_pem.write_to_path(folder / "ca.pem")

    certify(tmp_path / "hub" / "credentials")
    certify(tmp_path / "eu" / "credentials")
    port = free_port()
    hub = regions.prepare_hub(tmp_path / "hub", host="127.0.0.1", port=port)
    eu = regions.prepare_region(tmp_path / "eu", "eu", f"tls://127.0.0.1:{port}", hub / regions.LINKS)
    async with Server(hub, prepared=True) as near, Server(eu, prepared=True) as far:
        async with await Bus.connect(near.url, role="admin", credentials=near.credentials, timeout=PATIENCE_S) as admin:
            await declare(admin)
        async with await Bus.connect(far.url, role="admin", credentials=far.credentials, timeout=PATIENCE_S) as admin:
            await regions.declare_mirror(admin)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b'"tls_required":true' in await reader.readline(), "no region connects without TLS"
        writer.close()


async def test_a_broker_may_require_certificates_of_clients(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with broker(tmp_path, authority, "127.0.0.1", clients=True) as server:
        authority.cert_pem.write_to_path(server.credentials / "ca.pem")
        with pytest.raises(BusError):
            await Bus.connect(server.url, role="admin", credentials=server.credentials, timeout=3)
        mine = authority.issue_cert("actor.example")
        mine.private_key_pem.write_to_path(server.credentials / "client.key")
        mine.cert_chain_pems[0].write_to_path(server.credentials / "client.pem")
        async with await Bus.connect(
            server.url, role="admin", credentials=server.credentials, timeout=PATIENCE_S
        ) as admin:
            assert admin.connection.connected
