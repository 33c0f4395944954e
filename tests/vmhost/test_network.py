"""Network access of a sandbox: listed destinations are reachable, each request is logged, all others are refused."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, OpResult
from headrace.vmhost import network
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.tunnel import OPENED, Records, record, target
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")
BIG = 300_000


class World(NamedTuple):
    """A host, a server outside of it, and the logged requests."""

    host: Host
    port: int
    said: list[tuple[str, str, dict[str, Any]]]
    asked: list[bytes]

    async def sandbox(self, group: str, *network: str) -> VmSandbox:
        request = Acquire(
            run="r", lane="train", role="rollout", group=group, slot=0, attempt=0, isolation="episode", network=network
        )
        return await self.host.acquire(request)


@pytest.fixture(params=["process", pytest.param("qemu", marks=pytest.mark.vm)], scope="module")
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    said: list[tuple[str, str, dict[str, Any]]] = []
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head)
        body = b"x" * BIG if b"/big" in head else b"hello"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    here = ("127.0.0.1:*", "localhost:*")
    environment = Environment(backend=request.param, cache_dir=CACHE, private_places=here)
    opened = await Host.open(environment, on_event=lambda *event: said.append(event))
    async with server:
        yield World(opened, server.sockets[0].getsockname()[1], said, asked)
        await opened.close()


FETCH = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        body = urllib.request.urlopen(url, timeout=60).read()
        print(len(body), body[:5].decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print("none")
"""


async def fetch(sandbox: VmSandbox, *urls: str) -> OpResult:
    return await sandbox.call(Exec(argv=("python3", "-c", FETCH, *urls), timeout_s=120.0))


async def test_what_is_on_the_list_gets_through_and_leaves_a_line(world: World) -> None:
    sandbox = await world.sandbox("open", f"127.0.0.1:{world.port}")
    base = f"http://127.0.0.1:{world.port}"
    # urllib leaves 127.0.0.1 to no_proxy; an address that means the same is not excepted.
    unset = Exec(argv=("env", "-u", "no_proxy", "-u", "NO_PROXY", "python3", "-c", FETCH, f"{base}/a?b", f"{base}/big"))
    outcome = await sandbox.call(unset)
    assert outcome.stdout == f"5 hello\n{BIG} xxxxx\n", outcome
    assert world.asked[-2].startswith(b"GET /a?b HTTP/1.1\r\nConnection: close\r\n")
    lines = [data for kind, _, data in world.said if kind == "network_request" and data["sandbox"] == sandbox.id]
    assert [(line["place"], line["allowed"]) for line in lines] == [(f"127.0.0.1:{world.port}", True)] * 2
    world.host.release(sandbox.id)


async def test_a_task_alone_opens_no_address_behind_the_firewall(world: World) -> None:
    """A task's list comes from a data set or a message: the node's own configuration names its private places."""
    reached: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(answer, "127.1.1.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        places = [f"127.1.1.1:{port}", f"2130772225:{port}", f"127.1.257:{port}", "169.254.169.254:80"]
        sandbox = await world.sandbox("private", *places)
        lines = (await fetch(sandbox, *(f"http://{place}/" for place in places))).stdout.splitlines()
        assert [line[:4] for line in lines] == ["403 "] * 4, lines
        assert all("private_places" in line for line in lines), lines
    assert reached == []
    world.host.release(sandbox.id)


async def test_what_is_not_on_the_list_is_refused_and_leaves_a_line(world: World) -> None:
    sandbox = await world.sandbox("closed", "example.invalid:80", "*.localtest:*")
    outcome = await fetch(
        sandbox, f"http://localhost.:{world.port}/", "http://pypi.example/", "http://example.invalid/"
    )
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("403 localhost.") and "not on this task's list" in lines[0], outcome
    assert lines[1].startswith("403 pypi.example:80 is not on") and lines[2].startswith("403 "), outcome
    told = [
        data["allowed"] for kind, _, data in world.said if kind == "network_request" and data["sandbox"] == sandbox.id
    ]
    assert told == [False] * 3
    world.host.release(sandbox.id)


@pytest.mark.slow
async def test_a_tunnel_for_what_a_proxy_does_not_read(world: World) -> None:
    sandbox = await world.sandbox("tunnel", f"localhost:{world.port}")
    script = f"""
import os, socket
host, port = os.environ["http_proxy"].removeprefix("http://").split(":")
def ask(first):
    with socket.create_connection((host, int(port))) as s:
        s.sendall(first)
        answer = s.recv(65536)
        if b" 200 " in answer:
            s.sendall(b"GET /inner HTTP/1.1\\r\\n\\r\\n")
            answer += s.recv(65536) + s.recv(65536)
        return answer
print(ask(b"CONNECT localhost:{world.port} HTTP/1.1\\r\\n\\r\\n"))
print(ask(b"CONNECT localhost:1 HTTP/1.1\\r\\n\\r\\n"))
print(ask(b"GET / HTTP/1.1\\r\\n\\r\\n"))
"""
    outcome = await sandbox.call(Exec(argv=("python3", "-c", script)))
    through, refused, wrong = outcome.stdout.splitlines()
    assert "200 Connection established" in through and "200 OK" in through, outcome
    assert "403 Forbidden" in refused and "400 Bad Request" in wrong, outcome
    world.host.release(sandbox.id)


@pytest.mark.parametrize("world", [pytest.param("qemu", marks=pytest.mark.vm)], indirect=True)
@pytest.mark.slow
async def test_a_sandbox_with_a_way_out_is_not_copied(world: World) -> None:
    sandbox = await world.sandbox("copied", "example.invalid:80")
    with pytest.raises(VmhostError, match="with network access cannot be copied"):
        await world.host.fork(sandbox.id, [])
    world.host.release(sandbox.id)


@pytest.mark.parametrize("world", [pytest.param("qemu", marks=pytest.mark.vm)], indirect=True)
async def test_without_a_list_there_is_no_way_out(world: World) -> None:
    for places in ((), ("example.invalid:80",)):
        sandbox = await world.sandbox(f"none{len(places)}", *places)
        script = f"""
import socket
for kind, place in ((1, ("127.0.0.1", {world.port})), (1, ("1.1.1.1", 53)), (2, ("1.1.1.1", 53))):
    try:
        with socket.socket(socket.AF_INET, kind) as s:
            s.connect(place)
            s.send(b"x")
            print("out", place, kind)
    except OSError:
        pass
try:
    print(socket.getaddrinfo("example.com", 80))
except OSError:
    print("no names")
"""
        before = len(world.asked)
        outcome = await sandbox.call(Exec(argv=("python3", "-c", script)))
        assert outcome.stdout == "no names\n" and len(world.asked) == before, outcome
        world.host.release(sandbox.id)


def test_places_are_written_in_one_way() -> None:
    network.check(("pypi.org:443", "*.debian.org:*", "[::1]:80", "localhost:8000"))
    for bad in ("pypi.org", "http://pypi.org", "a b:1", ":80", "x:"):
        with pytest.raises(VmhostError, match="expected name:port"):
            network.check((bad,))


def test_heads() -> None:
    assert target(b"CONNECT a.b:443 HTTP/1.1") == ("a.b:443", b"")
    head = b"GET http://a.b/c?d HTTP/1.1\r\nHost: a.b\r\nProxy-Authorization: x\r\nConnection: keep-alive"
    assert target(head) == ("a.b:80", b"GET /c?d HTTP/1.1\r\nConnection: close\r\nHost: a.b")
    assert target(b"GET http://a.b:8/ HTTP/1.1")[0] == "a.b:8"
    for bad in (b"", b"GET / HTTP/1.1", b"GET ftp://a/ HTTP/1.1", b"\xff x y"):
        with pytest.raises(ValueError, match=r"HTTP|http"):
            target(bad)


def test_records() -> None:
    whole = record(1, OPENED) + record(2, OPENED, b"abc")
    records = Records()
    parsed = [one for at in range(len(whole)) for one in records.feed(whole[at : at + 1])]
    assert parsed == [(1, OPENED, b""), (2, OPENED, b"abc")]
    with pytest.raises(ValueError, match="a record of kind"):
        list(Records().feed(b"\xff" * 64))
