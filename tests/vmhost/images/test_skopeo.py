"""Images of registries and of other stores, copied by a real skopeo: hostile registries, logins, interrupted copies."""

import asyncio
import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from headrace.cli.main import main
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, skopeo
from tests.support.archives import Layout, Members, file, folder, sha

NOISE = os.urandom(3 << 20)
LAYERS: list[Members] = [
    [folder("bin"), file("bin/sh", NOISE, mode=0o755)],
    [file("app", b"app")],
]
KINDS = {
    b'"manifests"': "application/vnd.oci.image.index.v1+json",
    b'"layers"': "application/vnd.oci.image.manifest.v1+json",
}


def kind_of(data: bytes) -> str:
    return next((kind for key, kind in KINDS.items() if key in data[:20_000]), "application/json")


class Server:
    """A registry in a thread: `blobs` by digest, `tags` by name, and what it does to a request before it answers."""

    def __init__(self) -> None:
        made = Layout()
        made.image(LAYERS, "arm", "gzip", arch="arm64")
        made.image(LAYERS, "amd", "gzip", User="", WorkingDir="/srv")
        self.tags = {"v1": made.all()["index.json"]}
        self.blobs = {f"sha256:{name[-64:]}": data for name, data in made.files.items() if name.startswith("blobs/")}
        self.cut_at = 0
        """Bytes after which the answer with a large blob is cut; 0: never."""
        self.sent = 0
        self.fetched: list[str] = []
        self.token = ""
        self.login = ""
        self.asked: list[str] = []

    @property
    def large(self) -> str:
        """The digest of the largest blob."""
        return max(self.blobs, key=lambda digest: len(self.blobs[digest]))

    async def ping(self, request: web.Request) -> web.StreamResponse:
        return self._denied(request) or web.Response()

    def _denied(self, request: web.Request) -> web.StreamResponse | None:
        if not self.token or request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        challenge = f'Bearer realm="http://{request.host}/token",service="here"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        if denied := self._denied(request):
            return denied
        name = request.match_info["name"]
        data = self.tags.get(name) or self.blobs.get(name)
        if not data:  # a tag may have changed the manifest that it names
            data = next((tag for tag in self.tags.values() if sha(tag) == name), b"")
        return web.Response(body=data, content_type=kind_of(data)) if data else web.Response(status=404)

    async def grant(self, request: web.Request) -> web.StreamResponse:
        expected = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if request.headers.get("Authorization", "") != expected:
            return web.Response(status=401)
        self.asked.append(request.query["scope"])
        return web.json_response({"token": self.token})

    async def blob(self, request: web.Request) -> web.StreamResponse:
        if denied := self._denied(request):
            return denied
        data = self.blobs[request.match_info["name"]]
        self.fetched.append(request.match_info["name"])
        answer = web.StreamResponse()
        answer.content_length = len(data)
        await answer.prepare(request)
        part = data[: self.cut_at] if self.cut_at and len(data) > self.cut_at else data
        self.sent += len(part)
        await answer.write(part)
        if len(part) < len(data):
            assert request.transport is not None
            request.transport.close()
        return answer


class Registry:
    """The server and how its image is pulled."""

    def __init__(self, server: Server, host: str, cache: Path) -> None:
        self.server, self.host, self.cache, self.said = server, host, cache, list[str]()
        self.name = f"{host}/org/app"

    def pull(self, version: str = ":v1", **copying: object) -> imported.Image:
        settings = msgspec.convert({"insecure": (self.host,), "timeout_s": 60.0} | copying, skopeo.Copying)
        return skopeo.take(self.cache, self.name + version, imported.Request(), settings, self.said.append)

    def refused(self, version: str = ":v1", **copying: object) -> str:
        """The sentence that refuses the image, of which nothing is stored."""
        with pytest.raises(VmhostError, match="can't be imported: ") as caught:
            self.pull(version, **copying)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
        assert imported.names(self.cache) == []
        return str(caught.value)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(skopeo, "_RETRIES", ("--retry-times", "0"))
    made = Server()
    app = web.Application()
    app.add_routes(
        [
            web.get("/v2/", made.ping),
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
        yield Registry(made, f"127.0.0.1:{port}", tmp_path / "cache")
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()


def test_layers_of_the_store_are_not_fetched_again(registry: Registry) -> None:
    image = registry.pull()
    assert (image.name, image.workdir, image.tags) == ("app-v1", "/srv", (f"{registry.name}:v1",))
    assert len(registry.said) == 1 and "2 of 2 layers" in registry.said[0]
    large, registry.server.fetched = registry.server.large, []
    assert registry.pull().digest == image.digest
    assert large not in registry.server.fetched and registry.server.sent < 1.1 * len(NOISE)
    assert imported.find(registry.cache, f"{registry.name}:v1") == image
    digest = sha(registry.server.tags["v1"])
    assert registry.pull(f":v1@{digest}").segments() == image.segments(), "a digest decides where there is a tag too"
    assert not [*(registry.cache / "downloads").glob("*/*")]


def test_a_cut_copy_goes_on_where_it_stopped(registry: Registry) -> None:
    server = registry.server
    server.cut_at = 1 << 20
    registry.refused()
    server.cut_at, before = 0, list(server.fetched)
    small = [digest for digest in before if len(server.blobs[digest]) < 1000 and server.blobs[digest][0] == 0x1F]
    registry.pull()
    again = server.fetched[len(before) :]
    assert again.count(server.large) == 1 and not set(small) & set(again), "what was whole is not fetched again"


def test_a_process_that_died_leaves_no_layer_behind_that_is_taken_for_whole(registry: Registry) -> None:
    place = registry.cache / "downloads"
    server = registry.server
    server.cut_at = 1 << 20
    registry.refused()
    (layout,) = [path for path in place.iterdir() if path.is_dir()]
    (layout / "blobs/sha256" / server.large[7:]).touch()
    server.cut_at = 0
    assert registry.pull().bytes > len(NOISE)


def test_a_wrong_digest_is_refused(registry: Registry) -> None:
    server = registry.server
    digest, data = server.large, server.blobs[server.large]
    server.blobs[digest] = data[:-100] + bytes(100)
    registry.refused()
    registry.refused(f"@sha256:{'0' * 64}")
    server.tags[f"sha256:{'1' * 64}"] = server.tags["v1"]
    registry.refused(f"@sha256:{'1' * 64}")
    server.blobs[digest] = data
    assert registry.pull().workdir == "/srv"


def forged(server: Server, **fields: object) -> None:
    """The manifest of the large layer with other fields in its first layer; `layers` replaces all of them."""
    manifest = json.loads(next(data for data in server.blobs.values() if b'"layers"' in data and b"linux" not in data))
    manifest["layers"] = fields.pop("layers", [manifest["layers"][0] | fields, *manifest["layers"][1:]])
    server.tags["v1"] = json.dumps(manifest).encode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sends", [b"", b"<html>", NOISE[: 1 << 20], NOISE * 20])
def test_a_registry_that_sends_something_else_is_given_up(registry: Registry, sends: bytes) -> None:
    registry.server.blobs[registry.server.large] = sends
    registry.refused()
    files = [path for path in registry.cache.rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) < 32 << 20, "no file outgrows its manifest"


@pytest.mark.parametrize("size", [1 << 60, 65 << 30])
def test_layers_larger_than_any_image_are_not_fetched(registry: Registry, size: int) -> None:
    forged(registry.server, size=size)
    assert f"its layers have {size >> 20} MiB; expected at most" in registry.refused()
    assert registry.server.sent < 100_000


@pytest.mark.parametrize(
    "fields",
    [
        *({"size": -1}, {"size": "1"}, {"digest": 7}, {"digest": "sha256:../../x"}, {"digest": "sha512:" + "0" * 128}),
        *({"layers": 3}, {"layers": [1]}, {"layers": {}}),
    ],
)
def test_an_odd_manifest_is_refused(registry: Registry, fields: dict[str, object]) -> None:
    forged(registry.server, **fields)
    registry.refused()
    assert registry.server.sent < 100_000


def test_platform_token_and_login(registry: Registry, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = registry.server
    server.token, server.login = "t0ken", "user:pass:word"
    assert "run skopeo login" in registry.refused()
    auth = base64.b64encode(server.login.encode()).decode()
    (tmp_path / "home" / ".docker").mkdir(parents=True)
    logins = tmp_path / "home" / ".docker" / "config.json"
    logins.write_text(json.dumps({"auths": {registry.host: {"auth": base64.b64encode(b"user:wr0ng").decode()}}}))
    refused = registry.refused()
    assert "wr0ng" not in refused and base64.b64encode(b"user:wr0ng").decode() not in refused
    logins.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    assert registry.pull().name == "app-v1" and set(server.asked) == {"repository:org/app:pull"}
    assert not {"pass:word", "t0ken"} & set(registry.said) and "pass:word" not in "".join(capfd.readouterr())
    server.token = ""
    index = json.loads(server.tags["v1"])
    arm = [entry for entry in index["manifests"] if entry["platform"]["architecture"] == "arm64"]
    server.tags["v2"] = json.dumps(index | {"manifests": arm}).encode()
    with pytest.raises(VmhostError, match="amd64"):
        registry.pull(":v2")
    with pytest.raises(VmhostError, match="expected an image such as"):
        skopeo.take(registry.cache, "Not An Image", imported.Request(), skopeo.Copying(), print)


def test_only_a_registry_that_the_configuration_names_is_asked_without_tls(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["images", f"{registry.name}:v1", "--set", f"environment.cache_dir={registry.cache}"]
    assert main([*words, "--set", 'environment.insecure_registries=["127.0.0.1:1"]']) == 3
    assert "can't be imported: " in capsys.readouterr().err and registry.server.fetched == []
    assert main([*words, "--set", f'environment.insecure_registries=["{registry.host}"]']) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "app-v1"


def test_an_image_of_another_store_is_copied_and_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Layout()
    made.image([[folder("bin"), file("bin/sh", b"shell", mode=0o755)], [file("app", b"1")]], "1", "gzip")
    made.folder(tmp_path / "layout")
    monkeypatch.setattr(skopeo, "TRANSPORTS", ("oci:",))
    source = f"oci:{tmp_path / 'layout'}:1"
    monkeypatch.chdir(tmp_path)
    image = skopeo.take(tmp_path / "cache", source, imported.Request(name="app"), skopeo.Copying(), print)
    assert (image.name, image.entries) == ("app", 3)
    assert imported.find(tmp_path / "cache", "app") == image
    assert not [*(tmp_path / "cache" / "downloads").glob("*/*")]


def test_without_the_store_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--set", f"environment.cache_dir={tmp_path / 'cache'}"]
    if Path("/var/run/docker.sock").exists():
        pytest.skip("a docker daemon runs here")
    assert main(["images", "docker-daemon:app:1", *where]) == 3
    said = capsys.readouterr().err
    assert "app:1 can't be imported: " in said and len(said.splitlines()) == 1, said


def test_a_machine_without_skopeo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VmhostError, match="apt-get install skopeo"):
        skopeo.take(tmp_path, "docker-daemon:app:1", imported.Request(), skopeo.Copying(), print)
    assert os.listdir(tmp_path) == []
