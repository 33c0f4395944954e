"""Pulling from registries: a real one on loopback, cut connections, wrong digests, tokens and logins."""

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from headrace.backoff import Backoff
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, registry
from tests.support.archives import Layout, Members, file, folder

NOISE = os.urandom(3 << 20)
LAYERS: list[Members] = [
    [folder("bin"), file("bin/sh", NOISE, mode=0o755)],
    [file("app", b"app")],
]


def layout() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Blobs and manifests of an image for two platforms, by digest; the index is ``v1``."""
    made = Layout()
    made.image(LAYERS, "arm", "gzip", arch="arm64")
    made.image(LAYERS, "amd", "gzip", User="", WorkingDir="/srv")
    index = made.all()["index.json"]
    blobs = {f"sha256:{name[-64:]}": data for name, data in made.files.items() if name.startswith("blobs/")}
    return blobs, {"v1": index}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A registry in a thread: `blobs` by digest, `tags` by name, and what it does to a request before it answers."""

    def __init__(self) -> None:
        self.blobs, self.tags = layout()
        self.cut_at = 0
        """Bytes after which the answer with a large blob is cut; 0: never."""
        self.ranges: list[str] = []
        self.sent = 0
        self.token = ""
        self.login = ""
        self.asked: list[str] = []

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://{request.host}/token",service="here"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        name = request.match_info["name"]
        data = self.tags.get(name) or self.blobs.get(name)
        return web.Response(body=data) if data else web.Response(status=404)

    async def grant(self, request: web.Request) -> web.StreamResponse:
        expected = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if request.headers.get("Authorization", "") != expected:
            return web.Response(status=401)
        self.asked.append(request.query["scope"])
        return web.json_response({"token": self.token})

    async def blob(self, request: web.Request) -> web.StreamResponse:
        data = self.blobs[request.match_info["name"]]
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        self.ranges.append(request.headers.get("Range", ""))
        answer = web.StreamResponse(status=206 if start else 200)
        answer.content_length = len(data) - start
        await answer.prepare(request)
        part = data[start:]
        if self.cut_at and len(part) > self.cut_at:
            part = part[: self.cut_at]
        self.sent += len(part)
        await answer.write(part)
        if len(part) < len(data) - start:
            assert request.transport is not None
            request.transport.close()
        return answer


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    made = Server()
    app = web.Application()
    app.add_routes(
        [
            web.get("/v2/org/app/manifests/{name}", made.manifest),
            web.get("/v2/org/app/blobs/{name}", made.blob),
            web.get("/token", made.grant),
        ]
    )
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.SockSite(runner, listening).start())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        yield made, f"127.0.0.1:{port}/org/app"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "RETRY_S", (0.001, 0.01))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def pull(cache: Path, reference: str) -> imported.Image:
    return registry.pull(cache, reference, imported.Request())


def test_a_cut_download_goes_on_where_it_stopped(server: tuple[Server, str], tmp_path: Path) -> None:
    made, name = server
    made.cut_at = 1 << 20
    image = pull(tmp_path / "cache", f"{name}:v1")
    assert (image.name, image.workdir, image.tags) == ("app-v1", "/srv", (f"{name}:v1",))
    assert made.ranges.count(f"bytes={1 << 20}-") == 1 and f"bytes={2 << 20}-" in made.ranges
    large = max(len(data) for data in made.blobs.values())
    assert made.sent < 1.1 * large, "no byte came twice"
    before = made.sent
    assert pull(tmp_path / "cache", f"{name}:v1").digest == image.digest
    assert made.sent - before < 10_000, "layers of the store are not downloaded again"
    assert imported.find(tmp_path / "cache", f"{name}:v1") == image


def test_a_download_that_ends_for_good_says_so_and_a_later_pull_continues(
    server: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, name = server
    made.cut_at = 1 << 20
    monkeypatch.setattr(registry, "TRIES", 1)
    go_on = registry.Client._go_on
    calls = 0

    async def once(self: registry.Client, digest: str, part: Path, have: int, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise TimeoutError
        await go_on(self, digest, part, have, size)

    monkeypatch.setattr(registry.Client, "_go_on", once)
    with pytest.raises(VmhostError, match=r"stopped at 1048576 of \d+ bytes .*; pull again to go on"):
        pull(tmp_path / "cache", f"{name}:v1")
    monkeypatch.setattr(registry.Client, "_go_on", go_on)
    made.cut_at = 0
    pull(tmp_path / "cache", f"{name}:v1")
    assert f"bytes={1 << 20}-" in made.ranges


def test_a_wrong_digest_is_refused(server: tuple[Server, str], tmp_path: Path) -> None:
    made, name = server
    digest, data = max(made.blobs.items(), key=lambda pair: len(pair[1]))
    made.blobs[digest] = data[:-100] + bytes(100)
    with pytest.raises(VmhostError, match=f"its digest is not {digest}"):
        pull(tmp_path / "cache", f"{name}:v1")
    assert imported.names(tmp_path / "cache") == [] and not list((tmp_path / "cache" / "downloads").iterdir())
    made.blobs[digest] = data + bytes(100)
    with pytest.raises(VmhostError, match=r"is larger than its \d+ bytes"):
        pull(tmp_path / "cache", f"{name}:v1")
    manifest = next(name for name, data in made.blobs.items() if b'"layers"' in data and b"diff_ids" not in data)
    with pytest.raises(VmhostError, match="404: there is no such image"):
        pull(tmp_path / "cache", f"{name}@sha256:{'0' * 64}")
    made.tags[manifest] = b"{}"
    with pytest.raises(VmhostError, match=f"its digest is not {manifest}"):
        pull(tmp_path / "cache", f"{name}@{manifest}")


def forged(made: Server, **fields: object) -> None:
    """The manifest of the large layer with other fields in its first layer; `layers` replaces all of them."""
    manifest = json.loads(next(data for data in made.blobs.values() if b'"layers"' in data and b"linux" not in data))
    manifest["layers"] = fields.pop("layers", [manifest["layers"][0] | fields, *manifest["layers"][1:]])
    made.tags["v1"] = json.dumps(manifest).encode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sends", [b"", b"<html>", NOISE[: 1 << 20]])
def test_a_registry_that_sends_less_for_ever_is_given_up(
    server: tuple[Server, str], tmp_path: Path, sends: bytes
) -> None:
    made, name = server
    digest = max(made.blobs, key=lambda digest: len(made.blobs[digest]))
    made.blobs[digest] = sends
    with pytest.raises(VmhostError, match=r"stopped at \d+ of \d+ bytes|is damaged"):
        pull(tmp_path / "cache", f"{name}:v1")
    assert len(made.ranges) <= 2 * registry.TRIES + 2
    assert imported.names(tmp_path / "cache") == []


@pytest.mark.parametrize("size", [1 << 60, 65 << 30])
def test_layers_larger_than_any_image_are_not_downloaded(server: tuple[Server, str], tmp_path: Path, size: int) -> None:
    made, name = server
    forged(made, size=size)
    with pytest.raises(VmhostError, match=f"its layers have {size >> 20} MiB; expected at most"):
        pull(tmp_path / "cache", f"{name}:v1")
    assert made.sent < 100_000


@pytest.mark.parametrize(
    "fields",
    [{"size": -1}, {"size": "1"}, {"size": None}, {"digest": 7}, {"layers": 3}, {"layers": [1]}, {"layers": {}}],
)
def test_an_odd_manifest_is_refused(server: tuple[Server, str], tmp_path: Path, fields: dict[str, object]) -> None:
    made, name = server
    forged(made, **fields)
    with pytest.raises(VmhostError, match="manifest cannot be read"):
        pull(tmp_path / "cache", f"{name}:v1")


@pytest.mark.anyio
@pytest.mark.parametrize("reference", ["reg.example/org/app:v1", "localhost:1/org/app:v1"])
async def test_a_login_goes_over_https_or_stays_on_the_registry_s_machine(
    server: tuple[Server, str], tmp_path: Path, reference: str
) -> None:
    made, name = server
    made.token, made.login = "t0ken", "user:password"
    auth = base64.b64encode(made.login.encode()).decode()
    host = reference.partition("/")[0]
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    realm = f"http://{name.partition('/')[0]}/token"
    async with ClientSession() as session:
        client = registry.Client(session, registry.Reference.parse(reference))
        with pytest.raises(VmhostError, match="a login is sent over HTTPS alone"):
            await client._authorize(f'Bearer realm="{realm}",service="here"')
    assert made.asked == []


def test_platform_token_and_login(server: tuple[Server, str], tmp_path: Path) -> None:
    made, name = server
    made.token, made.login = "t0ken", "user:pass:word"
    with pytest.raises(VmhostError, match="gives no token"):
        pull(tmp_path / "cache", f"{name}:v1")
    auth = base64.b64encode(made.login.encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {name.partition("/")[0]: {"auth": auth}}}))
    assert pull(tmp_path / "cache", f"{name}:v1").name == "app-v1"
    assert made.asked == ["repository:org/app:pull"]
    index = json.loads(made.tags["v1"])
    arm = [entry for entry in index["manifests"] if entry["platform"]["architecture"] == "arm64"]
    made.tags["v2"] = json.dumps(index | {"manifests": arm}).encode()
    with pytest.raises(VmhostError, match="no image for linux/amd64; it has linux/arm64"):
        pull(tmp_path / "cache", f"{name}:v2")
    with pytest.raises(VmhostError, match="expected an image such as"):
        pull(tmp_path / "cache", "Not An Image")


def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-mine"
    helper.write_text('#!/bin/sh\nread name\necho "{\\"Username\\": \\"u\\", \\"Secret\\": \\"of $name\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {"reg.example": "mine", "no.example": "absent"}}))
    assert registry.credentials("reg.example") == ("u", "of reg.example")
    assert registry.credentials("other.example") is None
    with pytest.raises(VmhostError, match="docker-credential-absent is not installed"):
        registry.credentials("no.example")
    monkeypatch.setattr(registry, "HELPER_S", 1e-6)
    with pytest.raises(VmhostError, match=r"^docker-credential-mine gave no login for reg\.example within 1e-06 s"):
        registry.credentials("reg.example")


@pytest.fixture
async def distribution(tmp_path: Path) -> AsyncIterator[str]:
    """Debian's docker-registry on a free port of loopback."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed: apt-get install docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "registry.json"
    store = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config.write_text(json.dumps({"version": 0.1, "storage": store, "http": {"addr": f"127.0.0.1:{port}"}}))
    process = await asyncio.create_subprocess_exec(
        program, "serve", str(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    retry = Backoff(0.02, 0.5)
    deadline = time.monotonic() + 60
    async with ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/v2/") as answer:
                    assert answer.status == 200
                    break
            except OSError:
                assert time.monotonic() < deadline, "docker-registry did not start"
                await retry.sleep()
    yield f"127.0.0.1:{port}"
    process.kill()
    await process.wait()


@pytest.mark.anyio
async def test_a_real_registry_is_pulled_from(distribution: str, tmp_path: Path) -> None:
    blobs, tags = layout()
    manifests = {name: data for name, data in blobs.items() if b'"layers"' in data[:4000] and b"diff_ids" not in data}
    async with ClientSession() as session:

        async def push(name: str, data: bytes) -> None:
            async with session.post(f"http://{distribution}/v2/org/app/blobs/uploads/") as answer:
                place = answer.headers["Location"]
            async with session.put(place, params={"digest": name}, data=io.BytesIO(data)) as answer:
                assert answer.status == 201, await answer.text()

        for name, data in blobs.items():
            if name not in manifests:
                await push(name, data)
        kinds = {name: "application/vnd.oci.image.manifest.v1+json" for name in manifests}
        index = json.loads(tags["v1"]) | {"mediaType": "application/vnd.oci.image.index.v1+json"}
        for name, data in [*manifests.items(), ("v1", json.dumps(index).encode())]:
            kind = kinds.get(name, index["mediaType"])
            where = f"http://{distribution}/v2/org/app/manifests/{name}"
            async with session.put(where, data=data, headers={"Content-Type": kind}) as answer:
                assert answer.status == 201, await answer.text()
    digest = f"sha256:{hashlib.sha256(json.dumps(index).encode()).hexdigest()}"
    image = await asyncio.to_thread(pull, tmp_path / "cache", f"{distribution}/org/app:v1")
    same = await asyncio.to_thread(pull, tmp_path / "cache", f"{distribution}/org/app@{digest}")
    assert image.segments() == same.segments() and image.workdir == "/srv"
