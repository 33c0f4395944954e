"""The proxies of docs/clients.md in front of a gateway with the embedded engine: real nginx and Caddy, over TLS."""

import asyncio
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import trustme

from headrace.actors.rollout.actor import Rollout
from headrace.config import Config, Engine
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.registry import admit
from tests.actors.rollout.test_client_turns import Client, client_of, model, run
from tests.actors.rollout.test_streams import BODIES, SEED, is_cut, long
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.client_engine import PLAYS, Play, Script
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

__all__ = ["model", "run"]
pytestmark = [pytest.mark.anyio, pytest.mark.clients]
NAME = "gateway.example"
ENGINE = "tests.support.client_engine:open_engine"
NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""
CADDY = "{{\n    admin off\n    skip_install_trust\n    auto_https disable_redirects\n}}\n{server}"


def block(language: str) -> str:
    """The example of a proxy in docs/clients.md."""
    text = (ROOT / "docs" / "clients.md").read_text()
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nginx(folder: Path, port: int, upstream: str, read_s: int = 900) -> list[str]:
    """read_s: seconds without a byte from the gateway after which the proxy ends the answer."""
    pair = trustme.CA().issue_cert(NAME)
    (folder / "chain.pem").write_bytes(b"".join(part.bytes() for part in pair.cert_chain_pems))
    (folder / "key.pem").write_bytes(pair.private_key_pem.bytes())
    server = block("nginx").replace("listen 443", f"listen 127.0.0.1:{port}").replace("/etc/nginx", str(folder))
    server = server.replace("127.0.0.1:8080", upstream).replace("read_timeout 900s", f"read_timeout {read_s}s")
    text = NGINX.format(folder=folder, server=server)
    (folder / "nginx.conf").write_text(text)
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def caddy(folder: Path, port: int, upstream: str, read_s: int = 900) -> list[str]:
    server = block("caddy").replace(NAME, f"https://{NAME}:{port}").replace("127.0.0.1:8080", upstream)
    server = server.replace("{\n", "{\n    bind 127.0.0.1\n    tls internal\n", 1)
    limit = f"transport http {{\n    read_timeout {read_s}s\n}}\n"
    server = server.replace(f"reverse_proxy {upstream}", f"reverse_proxy {upstream} {{\n{limit}}}")
    (folder / "Caddyfile").write_text(CADDY.format(server=server))
    return [shutil.which("caddy") or "caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@contextmanager
def proxied(words: list[str], folder: Path) -> Iterator[None]:
    """The proxy's process."""
    env = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def settings(folder: Path) -> Config:
    made = long(folder)
    return msgspec.structs.replace(
        made, production=msgspec.structs.replace(made.production, public_urls=(f"https://{NAME}",))
    )


async def answering(bare: aiohttp.ClientSession, url: str) -> None:
    """Wait until the proxy serves the gateway."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with bare.get(url + "/healthz", headers={"Host": NAME}, server_hostname=NAME) as answer:
                    assert answer.status in (200, 503), "503: no policy is served yet"
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


@pytest.fixture
async def client(connect: Connect, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr("headrace.gateway.serving.secrets.randbits", lambda bits: SEED)
    async with client_of(settings(tmp_path), connect, tmp_path, run) as opened:
        yield opened


@pytest.mark.parametrize("program", [nginx, caddy])
async def test_tokens_and_cancels_pass_a_proxy_and_routes_stay_keyed(
    connect: Connect, client: Client, run: str, tmp_path: Path, program: object
) -> None:
    (folder := tmp_path / "proxy").mkdir()
    port = free_port()
    words = (nginx if program is nginx else caddy)(folder, port, client.url.removeprefix("http://"))
    context = ssl._create_unverified_context()
    with proxied(words, folder):
        connector = aiohttp.TCPConnector(ssl=context)
        url, headers = f"https://127.0.0.1:{port}", {"Host": NAME}
        async with aiohttp.ClientSession(connector=connector) as bare:
            await answering(bare, url)
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/sessions"), ("DELETE", "/v1/users/ada")):
                async with bare.request(method, url + path, headers=headers, server_hostname=NAME) as answer:
                    assert answer.status == 401, path
            keyed = headers | {"x-api-key": client.http.headers["x-api-key"]}
            body = BODIES["/v1/chat/completions"] | {"model": "latest", "stream": True}
            async with living(
                Rollout, settings(tmp_path), await connect("rollout", node="n1"), run, "product"
            ) as actor:
                path = f"{url}/v1/chat/completions"
                async with bare.post(path, json=body, headers=keyed, server_hostname=NAME) as answer:
                    assert answer.status == 200
                    data = b""
                    while b"delta" not in data:
                        data += await answer.content.readany()
                    engine = actor._policies.engine
                    assert isinstance(engine, EmbeddedEngine) and engine.stats()["running"] == 1
                    # The client dies in the middle of its turn; one that ends TLS in order waits for nginx's answer.
                    assert answer.connection is not None and answer.connection.transport is not None
                    answer.connection.transport.abort()
                await is_cut(connect, run, actor)


@pytest.mark.parametrize("program", [nginx, caddy])
async def test_the_heartbeat_keeps_a_stream_through_a_proxy(
    connect: Connect, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[..., list[str]]
) -> None:
    """Nothing is sampled for several times as long as the proxy waits for a byte."""
    monkeypatch.setattr("headrace.gateway.endpoints.COMMENT_EVERY_S", 0.2)
    admit("engines", [ENGINE])
    made = msgspec.structs.replace(settings(tmp_path), engine=Engine(kind=ENGINE))
    PLAYS.append(play := Play(Script("mean of xs", [("A word.", [])]), held=0))
    (folder := tmp_path / "proxy").mkdir()
    port, context = free_port(), ssl._create_unverified_context()
    async with (
        client_of(made, connect, tmp_path, run) as client,
        living(Rollout, made, await connect("rollout", node="n1"), run, "product"),
    ):
        with proxied(program(folder, port, client.url.removeprefix("http://"), read_s=1), folder):
            headers = {"Host": NAME, "x-api-key": client.http.headers["x-api-key"]}
            body = BODIES["/v1/chat/completions"] | {"model": "latest", "stream": True}
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as bare:
                await answering(bare, f"https://127.0.0.1:{port}")
                path = f"https://127.0.0.1:{port}/v1/chat/completions"
                async with bare.post(path, json=body, headers=headers, server_hostname=NAME) as answer:
                    assert answer.status == 200
                    data = b""
                    while data.count(b": sampling") < 20:
                        data += (more := await answer.content.readany())
                        assert more, "the proxy ended the answer"
                    assert b"A word" not in data and not play.cut.is_set()
