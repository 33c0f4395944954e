"""Every route of a gateway: none but health answers without a key, or to a page of another site; none acts before."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web

from headrace.actors.gateway import Gateway
from headrace.bus.broker.server import Server
from headrace.gateway.http import HEALTH, Listener
from headrace.gateway.tenants.keys import ApiKeys
from headrace.messages import subjects
from headrace.messages.product import SCOPES
from tests.conftest import Connect
from tests.support.gateway import OpenGateway

pytestmark = pytest.mark.anyio
ASK = {"user": "zoe", "suite": "generated/heldout", "task": "3"}
BODY = json.dumps(ASK | {"prompt": "x", "thumb": "up", "agent": "a"}).encode()
CROSS_SITE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
"""A browser adds these to the request of another site's page."""


class Route(NamedTuple):
    method: str
    path: str
    public: bool
    owned: bool
    """Its path names something of a tenant."""


def routes_of(gateway: Gateway, ids: dict[str, str]) -> list[Route]:
    """The routes of the application itself. ids: values of the parts of their paths."""
    app = gateway._listener._runner.app
    assert app is not None
    routes = []
    for route in app.router.routes():
        assert route.resource is not None
        pattern = route.resource.canonical
        path = re.sub(r"{(\w+)[^}]*}", lambda part: ids[part[1]], pattern)
        owned = "{" in pattern and not pattern.startswith("/v1/models") and "user" not in pattern
        routes.append(Route(route.method, path, pattern == HEALTH, owned))
    return routes


async def made(product: OpenGateway) -> dict[str, str]:
    """A session and an agent of the product's own tenant: values of the parts of paths. A set needs an environment."""
    ids = {"user": "zoe", "path": "a.py", "set": "x1", "name": "latest"}
    ids["session"] = (await product.call("POST", "/v1/sessions", ASK))[1]["session"]
    _, alone = await product.call("POST", "/v1/agents", {"prompt": "x", "workspace": {"files": {"a.py": "1"}}})
    return ids | {"agent": alone["agent"]["id"], "run": alone["run"]["id"]}


class Open(NamedTuple):
    product: OpenGateway
    routes: list[Route]
    theirs: str
    """The key of another tenant."""


@pytest.fixture
async def opened(connect: Connect, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    product = await OpenGateway(
        connect, tmp_path, subjects.token(request.node.name)[:40], public_urls=("https://ours.example:8443",)
    ).open()
    try:
        theirs = await product.other("other", scopes=SCOPES)
        yield Open(product, routes_of(product.gateway, await made(product)), theirs)
    finally:
        await product.gateway.shut(1.0)  # an event loop with an open port never closes


async def stored(product: OpenGateway) -> list[int]:
    """The ends of the streams to which a gateway publishes."""
    return [await product.admin.last_seq(stream) for stream in ("HR_TASK", "HR_LEDGER", "HR_FEEDBACK", "KV_HR_SESSION")]


async def test_no_route_but_health_answers_without_a_key_of_its_tenant(opened: Open) -> None:
    product, routes, theirs = opened
    before = await stored(product)
    assert len(routes) > 25 and [route.path for route in routes if route.public] == [HEALTH, HEALTH]  # GET and HEAD
    async with aiohttp.ClientSession() as http:
        for method, path, public, owned in routes:
            for name, headers, refused in (
                ("without a key", {}, 401),
                ("with a wrong key", {"x-api-key": "hr-none"}, 401),
                ("as basic auth", {"Authorization": f"Basic {product.key}"}, 401),
                ("in the query", {}, 401),
                ("with another tenant's", {"x-api-key": theirs}, 404),
                ("cross-site", CROSS_SITE | {"x-api-key": product.key}, 403),
                ("of a sandboxed page", {"Origin": "null", "x-api-key": product.key}, 403),
                ("under a foreign name", {"Host": "evil.example", "x-api-key": product.key}, 403),
            ):
                if name == "with another tenant's" and not owned:
                    continue  # an empty world of its own
                url = f"{product.url}{path}" + (f"?key={product.key}" if name == "in the query" else "")
                body = None if method in ("GET", "HEAD") else BODY
                typed = {"Content-Type": "application/json"} if body else {}
                async with http.request(method, url, data=body, headers=headers | typed) as answer:
                    if public and refused == 401:
                        assert answer.status == 503, "health: no policy is served"
                    elif refused == 404:
                        assert answer.status in (403, 404), (name, method, path, answer.status)
                    else:
                        assert answer.status == refused, (name, method, path, answer.status)
                    assert not [header for header in answer.headers if header.startswith("Access-Control")]
            async with http.options(f"{product.url}{path}", headers=PREFLIGHT) as answer:
                assert answer.status == 403 and not [name for name in answer.headers if name.startswith("Access-")]
    assert await stored(product) == before


PREFLIGHT = {
    "Origin": "https://evil.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type,x-api-key",
}


KINDS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=utf-7")


async def test_a_body_is_json_by_its_type_alone_and_no_other_is_read(opened: Open) -> None:
    """Before, `text/plain` was read as JSON, which any page can send to any address."""
    product, routes, _ = opened
    for method, path, *_ in routes:
        for kind in (*KINDS, "") if method not in ("GET", "HEAD") else ():
            typed = f"Content-Type: {kind}\r\n" if kind else ""
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {product.key}\r\n{typed}"
            assert (await said(product, head + "Content-Length: 99\r\n\r\n{"))[:12] == "HTTP/1.1 415", (path, kind)


async def said(product: OpenGateway, data: str) -> str:
    """The first bytes that the gateway answers to these."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(product.url.rpartition(":")[2]))
    writer.write(data.encode())
    async with asyncio.timeout(30):
        answer = await reader.read(4096)
    writer.transport.abort()
    return answer.decode()


async def test_requests_that_hide_their_target_or_their_name_are_refused(opened: Open) -> None:
    product = opened.product
    key = f"x-api-key: {product.key}\r\n"
    port = product.url.rpartition(":")[2]
    for line, host, status in (
        ("GET /v1/models HTTP/1.1", "Host: localhost\r\n", 200),
        ("GET /v1/models HTTP/1.1", f"Host: 127.0.0.1:{port}\r\n", 200),
        ("GET /v1/models HTTP/1.1", "Host: [::1]:80\r\n", 200),
        ("GET /v1/models HTTP/1.1", "Host: ours.example\r\n", 200),
        ("GET /v1/models HTTP/1.1", "Host: ours.example:8443\r\nOrigin: https://ours.example:8443\r\n", 200),
        ("GET /v1/models HTTP/1.1", "Host: ours.example:8443\r\nOrigin: https://ours.example\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: localhost\r\nOrigin: http://localhost\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: localhost\r\nOrigin: https://ours.example:8443\r\nOrigin: null\r\n", 403),
        ("GET /v1/models HTTP/1.0", "", 403),
        ("GET /v1/models HTTP/1.1", "", 400),
        ("GET /v1/models HTTP/1.1", "Host: localhost\r\nHost: evil.example\r\n", 400),
        ("GET /v1/models HTTP/1.1", "Host: localhost.evil.example\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: localhost@evil.example\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: 127.0.0.1.\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: 2130706433\r\n", 403),
        ("GET /v1/models HTTP/1.1", "Host: \r\n", 403),
        ("GET http://evil.example/v1/models HTTP/1.1", "Host: localhost\r\n", 400),
        ("GET http://localhost/v1/models HTTP/1.1", "Host: evil.example\r\n", 400),
        ("OPTIONS * HTTP/1.1", "Host: localhost\r\n", 400),
        ("TRACE /v1/models HTTP/1.1", "Host: localhost\r\n", 405),
        ("GET //v1/models HTTP/1.1", "Host: localhost\r\n", 404),
        ("GET /v1/%2e%2e/v1/models HTTP/1.1", "Host: localhost\r\n", 404),
        ("GET /v1/models HTTP/1.1", "Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n", 200),
    ):
        answer = await said(product, f"{line}\r\n{host}{key}Connection: close\r\n\r\n")
        assert answer[9:12] == str(status), (line, host, answer)
        if status in (404, 405):
            assert (await said(product, f"{line}\r\n{host}\r\n"))[9:12] == "401", "without a key no path is known"


async def test_what_looks_like_the_health_route_needs_a_key(opened: Open) -> None:
    for path in (
        "//healthz",
        "/healthz/",
        "/healthz/../v1/models",
        "/HEALTHZ",
        "/healthz%2f..%2fv1%2fmodels",
        "/v1/healthz",
    ):
        assert (await said(opened.product, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))[9:12] == "401", path
    assert (await said(opened.product, "POST /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))[9:12] == "401"


async def test_a_route_that_is_added_is_covered(tmp_path: Path) -> None:
    """The check stands before the application, not in its handlers."""
    from headrace.gateway.tenants.admission import Admission

    reached: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    async def report(error: Exception, doing: str) -> None:
        raise AssertionError(doing) from error

    listener = Listener([web.get("/new", handler)], Admission(ApiKeys()).admit, report)
    url = await listener.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/new") as answer:
            assert answer.status == 401
    finally:
        await listener.stop()
    assert reached == []


async def test_a_keys_text_is_in_no_answer_no_log_and_no_record(
    opened: Open, server: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wherever a request has it: an agent that reads its environment sends it in a history."""
    caplog.set_level(logging.DEBUG)
    product, key = opened.product, opened.product.key
    turn = {"model": key, "user": key, "messages": [{"role": "user", "content": f"KEY={key}"}]}
    asked: list[tuple[str, str, Any, dict[str, str]]] = [
        *(("GET", f"{place}/{key}", None, {}) for place in ("", "/v1/models", "/v1/sessions", "/v1/agents")),
        ("GET", f"/v1/sessions/x?wait={key}", None, {}),
        ("DELETE", f"/v1/sessions/{key}", None, {}),
        ("POST", "/v1/sessions", ASK | {"suite": key}, {}),
        ("POST", "/v1/sessions", ASK | {"prompt": key, "files": {key: key}}, {}),
        ("POST", "/v1/sessions", {"user": key, "task": key, "metadata": {key: key}}, {}),
        ("POST", f"/v1/sessions/{key}/feedback", {"thumb": key}, {}),
        ("POST", "/v1/agents", {"prompt": key, "workspace": {"files": {"a.py": key}}}, {}),
        ("POST", "/v1/chat/completions", turn, {}),
        ("POST", "/v1/chat/completions", turn, {"X-Headrace-Session": key}),
        ("POST", "/v1/chat/completions", turn | {"stream": True}, {"Idempotency-Key": key}),
        ("POST", "/v1/messages", turn | {key: key}, {}),
        ("POST", "/v1/responses", {"input": [{"type": key}]}, {}),
    ]
    said = b""
    async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
        for method, path, body, headers in asked:
            async with http.request(method, product.url + path, json=body, headers=headers) as answer:
                said += str(answer.raw_headers).encode() + await answer.read()
    assert said.count(b"[API key]") >= 5, "an answer names what it was asked"
    told = capfd.readouterr()
    assert key.encode() not in said and key not in caplog.text + told.out + told.err
    for file in (*server.folder.rglob("*"), *product.folder.rglob("*")):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
