"""HTTPS at the gateway's port: real handshakes, a renewed certificate, and files that do not fit together."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from headrace.config import Production
from headrace.gateway import http
from headrace.gateway.tenants.admission import Admission
from headrace.gateway.tenants.keys import ApiKeys
from headrace.gateway.tls import RENEW_S, Certificate, CertificateError, client_context, configured

pytestmark = pytest.mark.anyio


class Files:
    """The two files of a certificate, and the authority that signs it."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "chain.pem", folder / "key.pem"
        self._authority = trustme.CA()

    def issue(self, *, key: bool = True) -> None:
        """Write a certificate for localhost, and with `key` its key."""
        leaf = self._authority.issue_cert("localhost")
        chain = b"".join(part.bytes() for part in leaf.cert_chain_pems)
        self.certificate.with_suffix(".new").write_bytes(chain)
        self.certificate.with_suffix(".new").rename(self.certificate)
        if key:
            self.key.write_bytes(leaf.private_key_pem.bytes())

    def trusted(self) -> ssl.SSLContext:
        """For a client that trusts the authority and checks the name."""
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.issue()
    return made


@pytest.fixture
async def served(files: Files) -> AsyncIterator[tuple[Certificate, int]]:
    """A listener with the certificate, and its port."""

    async def hello(request: web.Request) -> web.Response:
        return http.answer({"secure": request.secure})

    async def report(error: Exception, doing: str) -> None:
        raise AssertionError(f"{doing}: {error!r}")

    certificate = Certificate(str(files.certificate), str(files.key))
    listener = http.Listener([web.get(http.HEALTH, hello)], Admission(ApiKeys(files.certificate)).admit, report)
    url = await listener.start("127.0.0.1", 0, certificate)
    assert url.startswith("https://127.0.0.1:")
    yield certificate, int(url.rpartition(":")[2])
    await listener.stop()


async def serial(port: int, context: ssl.SSLContext) -> object:
    """The serial number of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    number = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return number


async def test_clients_that_trust_the_certificate_are_served_and_others_are_not(
    files: Files, served: tuple[Certificate, int]
) -> None:
    port = served[1]
    async with aiohttp.ClientSession() as client:
        async with client.get(f"https://localhost:{port}/healthz", ssl=files.trusted()) as answer:
            assert (answer.status, await answer.json()) == (200, {"secure": True})
        async with client.get(
            f"https://127.0.0.1:{port}/healthz", ssl=client_context(str(files.certificate))
        ) as answer:
            assert answer.status == 200, "the simulated users trust the certificate itself, under any name"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(f"https://localhost:{port}/healthz")
        with pytest.raises(aiohttp.ClientError):
            await client.get(f"http://localhost:{port}/healthz")


async def test_a_renewed_certificate_is_served_and_half_of_a_renewal_is_not(
    files: Files, served: tuple[Certificate, int]
) -> None:
    certificate, port = served
    first = await serial(port, files.trusted())
    assert not certificate.renew(), "nothing has changed"
    files.issue(key=False)
    with pytest.raises(CertificateError, match="key values mismatch"):
        certificate.renew()
    assert not certificate.renew(), "the same files are not tried again"
    assert await serial(port, files.trusted()) == first
    files.issue()
    assert certificate.renew()
    assert await serial(port, files.trusted()) != first


def test_files_that_cannot_be_used_are_named_with_the_reason(tmp_path: Path, files: Files) -> None:
    for certificate, key, reason in (
        (tmp_path / "absent.pem", files.key, "No such file or directory"),
        (files.key, files.key, "not pem|no start line|pem lib"),
        (files.certificate, files.certificate, "not pem|no start line|pem lib"),
    ):
        with pytest.raises(CertificateError, match=rf"cannot be used \(.*({reason}).*expected a PEM"):
            Certificate(str(certificate), str(key))


async def test_a_gateway_never_starts_without_the_certificate_that_it_should_have(files: Files) -> None:
    looked: list[float] = []

    async def event(kind: str, text: str, level: str) -> None:
        raise AssertionError(text)

    def every(seconds: float, look: Callable[[], Awaitable[None]], name: str) -> None:
        looked.append(seconds)

    assert configured(Production(), every, event) is None
    made = Production(tls_certificate=str(files.certificate), tls_key=str(files.key))
    assert configured(made, every, event) is not None and looked == [RENEW_S]
    files.issue(key=False)
    with pytest.raises(CertificateError, match=r"\[production\] tls_certificate: .* cannot be used"):
        configured(made, every, event)
