"""Dockerfiles built into the image store by a real buildah."""

import fcntl
import shutil
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.config import Environment
from headrace.messages.sandbox import Exec
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import building
from headrace.vmhost.images.imported import Request
from headrace.vmhost.node.host import Host
from headrace.vmhost.templates import cache_gc
from tests.support.bases import busybox
from tests.support.hosts import CACHE, ask

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
DOCKERFILE = """FROM scratch
ARG WHO
COPY root/ /
ENV GREETING=hello
WORKDIR /work
RUN echo "$GREETING $WHO" > made
"""


def context(place: Path, dockerfile: str = DOCKERFILE) -> Path:
    folder = place / "built-app"
    busybox(folder / "root")
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def build(*words: str) -> int:
    return main(["images", *words, "--set", f"environment.cache_dir={CACHE}"])


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM scratch\n")
    assert build(str(tmp_path)) == build(str(dockerfile)) == 3
    assert "buildah is not installed: apt-get install buildah" in capsys.readouterr().err
    for program, missing in (("buildah", "crun"), ("crun", "")):
        (tmp_path / program).write_text("")
        (tmp_path / program).chmod(0o755)
        if missing:
            assert build(str(tmp_path)) == 3 and f"apt-get install {missing}" in capsys.readouterr().err
    dockerfile.unlink()
    with pytest.raises(VmhostError, match="has no Dockerfile and no Containerfile: name the file by --file"):
        building.build(Path(CACHE), tmp_path, Request(name="a"), building.BuildOptions(), print)


def test_layers_of_builds_are_removed_unless_a_build_uses_them(tmp_path: Path) -> None:
    environment = Environment(cache_dir=str(tmp_path))
    place = tmp_path / "buildah"
    (place / "store" / "vfs").mkdir(parents=True)
    (place / "store" / "vfs" / "layer").write_bytes(bytes(3 << 20))
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (used,) = cache_gc.holdings(environment)
        assert (used.what, used.why) == ("layers of Dockerfiles", "a build uses them") and used.mib > 2.9
        assert cache_gc.collect(environment) == [] and (place / "store").exists()
    assert [entry.path for entry in cache_gc.collect(environment)] == [str(place)]
    assert not (place / "store").exists() and (place / "lock").exists() and cache_gc.holdings(environment) == []


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is not installed")
async def test_a_dockerfile_is_built_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = context(tmp_path)
    assert build(str(folder), "--build-arg", "WHO=world") == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert (report["name"], report["tags"], report["workdir"]) == ("built-app", ["built-app:latest"], "/work")
    if why := unavailable():
        pytest.skip(f"built, but no container can run it here: {why}")
    host = await Host.open(Environment(backend="container", cache_dir=CACHE))
    try:
        request = ask(lane="eval", isolation="episode", template="built-app", files={})
        sandbox = await host.acquire(request)
        assert (await sandbox.call(Exec(argv=("cat", "made")))).stdout == "hello world\n"
    finally:
        await host.close()
    (folder / "Dockerfile").write_text(DOCKERFILE + "RUN echo the end is near; exit 3\n")
    assert build(str(folder)) == 3
    assert "the end is near" in (error := capsys.readouterr().err) and "buildah ended with code" in error
    (folder / "Dockerfile").write_text(DOCKERFILE + "RUN sleep 600\n")
    assert build(str(folder), "--timeout-s", "5") == 3
    assert "did not end within 5 s" in capsys.readouterr().err
    assert f"{Path(CACHE).resolve()}/buildah" not in Path("/proc/self/mounts").read_text()
