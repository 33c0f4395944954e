"""Clients that never finish a body, leave, or send what is no HTTP: every request ends without a traceback."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from headrace.bus.errors import BusError
from headrace.gateway import http
from headrace.gateway.tenants.admission import Admission
from headrace.gateway.tenants.keys import ApiKeys
from tests.support.api_keys import entry

pytestmark = pytest.mark.anyio
KEY, OTHER = "hr-front", "hr-other"
HEADERS = {"x-api-key": KEY}
ENTRY = entry(KEY, requests_per_minute=10**6)


class Front:
    """A listener with one route that reads a body and one that waits."""

    def __init__(self, keys: ApiKeys) -> None:
        self.reported: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.entered, self.ready, self.reading = asyncio.Event(), asyncio.Event(), 0
        self.ready.set()
        admission = Admission(keys)
        self.listener = http.Listener(
            [web.post("/read", self.read), web.get("/wait", self.wait), web.get("/breaks", self.breaks)],
            admission.admit,
            self.report,
        )

    async def read(self, request: web.Request) -> web.Response:
        self.reading += 1
        self.entered.set()
        await self.ready.wait()
        return http.answer({"got": await http.read_json(request, dict[str, int])})

    async def wait(self, request: web.Request) -> web.Response:
        self.entered.set()
        await asyncio.sleep(http.wait_seconds(request))
        return http.answer({"waited": True})

    async def breaks(self, request: web.Request) -> web.StreamResponse:
        """Fails behind the beginning of its answer, or behind the whole of it."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one")
        if "whole" in request.query:
            await response.write_eof()
        raise BusError("gone")

    async def report(self, error: Exception, doing: str) -> None:
        self.reported.append(f"{doing}: {error!r}")

    async def open(self) -> "Front":
        self.url = await self.listener.start("127.0.0.1", 0)
        self.port = int(self.url.rpartition(":")[2])
        return self

    async def connect(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self._writers.append(writer)
        return reader

    def drop(self) -> None:
        """Reset every connection of `connect`."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def until_closed(self) -> None:
        server = self.listener._runner.server
        assert server is not None
        while server.connections:
            await asyncio.sleep(0.01)


@pytest.fixture
async def front(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Front]:
    caplog.set_level(logging.DEBUG)
    opened = await Front(ApiKeys([ENTRY, entry(OTHER)])).open()
    yield opened
    opened.drop()
    await opened.listener.stop()
    assert opened.reported == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("query", ["", "?whole=1"])
async def test_a_failure_behind_the_first_byte_writes_no_second_answer(front: Front, query: str) -> None:
    request = f"GET /breaks{query} HTTP/1.1\r\nHost: localhost\r\nx-api-key: hr-front\r\n\r\n".encode()
    reader = await front.connect(request * 2)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(4096):
            data += piece
    assert data.count(b"HTTP/1.1 ") <= 1 and b"HTTP/1.1 503" not in data
    await front.until_closed()


HALF_HEADERS = b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-"
HALF_BODY = (
    b"POST /read HTTP/1.1\r\nHost: localhost\r\nx-api-key: hr-front\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{"
)
WAITS = b"GET /wait?wait=30 HTTP/1.1\r\nHost: localhost\r\nx-api-key: hr-front\r\n\r\n"


async def test_a_body_that_does_not_arrive_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.1)
    assert (await (await front.connect(HALF_BODY)).read(12)) == b"HTTP/1.1 408"


async def test_an_unknown_path_or_method_is_no_defect_of_the_gateway(front: Front) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as client:
        for method, path, status in (("GET", "/none", 404), ("GET", "/%2e%2e/x", 404), ("POST", "/wait", 405)):
            async with client.request(method, front.url + path) as answer:
                assert answer.status == status and "error" in await answer.json()


async def test_clients_that_leave_cause_no_traceback(front: Front) -> None:
    """Some leave while their requests wait, as in a tenant's round, before their bodies are read."""
    before = asyncio.all_tasks()
    front.ready.clear()
    for data in (b"", HALF_HEADERS, HALF_BODY, WAITS):
        for _ in range(5):
            await front.connect(data)
    while front.reading < 5:
        await asyncio.sleep(0.01)
    front.drop()
    await front.until_closed()
    front.ready.set()
    while asyncio.all_tasks() - before:
        await asyncio.sleep(0.01)
    gc.collect()  # then asyncio logs the errors of tasks that nobody awaited


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(front: Front) -> None:
    head = HALF_BODY.replace(b"Length: 100", b"Length: %d" % (http.MAX_BODY + 1))
    assert (await (await front.connect(head)).read(12)) == b"HTTP/1.1 413"


async def test_the_bodies_of_one_key_have_a_limit_together(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand connections of one key, with 8 MiB each, were 8 GiB of the gateway."""
    monkeypatch.setattr(http, "MAX_BODIES", 3 * http.MAX_BODY)
    head = f"POST /read HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n".encode()
    unknown = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for number in range(3):
        await front.connect(unknown)
        while front.reading <= number:
            await asyncio.sleep(0.001)
    refused = await front.connect(unknown)
    assert b" 429 " in await refused.readline()
    small = await front.connect(head + b'Content-Length: 8\r\n\r\n{"a": 1}')
    assert b" 429 " in await small.readline()
    other = await front.connect(head.replace(KEY.encode(), OTHER.encode()) + b'Content-Length: 8\r\n\r\n{"a": 1}')
    assert b" 200 " in await other.readline()
    front.drop()  # clients that leave give their share back
    while True:
        async with aiohttp.ClientSession(headers=HEADERS) as session:
            async with session.post(f"{front.url}/read", json={"a": 1}) as answer:
                if answer.status == 200:
                    break


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_body_that_cannot_be_decoded_is_one_error(
    front: Front, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST /read HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n"
    body = f"Content-Encoding: {encoding}\r\nContent-Length: 4\r\nConnection: close\r\n\r\njunk"
    answer = await (await front.connect((head + body).encode())).read()
    assert answer.split(b" ")[1] == b"400" and b'"error"' in answer and not caplog.records


async def test_a_request_that_is_no_http_is_neither_logged_nor_sent_back(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    reader = await front.connect(f"POST /read HTTP/1.1\nHost: x\nx-api-key: {KEY}\n\n".encode())
    answer = await reader.read()
    assert answer.split(b" ")[1] == b"400" and KEY.encode() not in answer and not caplog.records
