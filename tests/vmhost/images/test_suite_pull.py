"""`headrace images pull --suite`: the images of a suite from a real registry on loopback, under another address."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.messages.tasks import Artifact, Oracle, Task, TaskRef, TestPlan, Verifier
from headrace.vmhost.images import imported
from tests.support.archives import Layout, file, folder, layer, packed, sha
from tests.support.folder_suites import write_suite

pytestmark = [
    pytest.mark.skipif(not shutil.which("docker-registry"), reason="needs docker-registry: make proxies"),
    pytest.mark.timeout(120),
]
BASE = [folder("bin"), file("bin/sh", os.urandom(2 << 20), mode=0o755)]
IMAGES = {
    "docker.io/bench/eval.django-1:latest": b"django",
    "docker.io/other/eval.django-1:latest": b"another image of the same name",
    "ghcr.io/org/verifier:2": b"verifier",
}
"""Reference, as tasks name it, to a file of the image."""


class Registry:
    """docker-registry with an empty store."""

    def __init__(self, place: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        place.mkdir()
        settings = {
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(place / "blobs")}},
            "http": {"addr": self.host},
        }
        (place / "config.yml").write_text(json.dumps(settings))
        self.log, self._place = place / "log", place
        with self.log.open("w") as log:
            words = ["docker-registry", "serve", str(place / "config.yml")]
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://{self.host}/v2/").close()
                return
            except urllib.error.URLError:
                continue
        raise RuntimeError(self.log.read_text())

    def add(self, repository: str, contents: bytes) -> None:
        """Store an image of two layers, of which all images share the first."""
        made = Layout()
        made.image([BASE, [file("app", contents)]], "1", "gzip", WorkingDir="/srv")
        layout = self._place / repository.replace("/", "-").replace(":", "-")
        layout.mkdir()
        words = ["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{made.folder(layout)}:1"]
        subprocess.run([*words, f"docker://{self.host}/{repository}"], check=True)

    def fetched(self) -> int:
        """How often the layer that all images share was sent."""
        words = ("response completed", "http.request.method=GET", sha(packed(layer(BASE), "gzip")))
        return sum(all(word in line for word in words) for line in self.log.read_text().splitlines())


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    made = Registry(tmp_path / "registry")
    yield made
    made.process.terminate()
    made.process.wait()


def suite(tmp_path: Path) -> list[str]:
    """Write a suite whose tasks name the first two images and whose verifier names the third. Returns arguments of the
    command."""
    django, other, verifier = IMAGES
    plan, pairs = TestPlan(kind="command", argv=("true",)), []
    for number, image in enumerate((django, other)):
        ref = TaskRef("mine", str(number))
        task = Task(ref=ref, family="mine", prompt="mend it", files={}, allowed=("**",), tests=plan, image=image)
        own = Verifier(image=verifier, artifacts=(Artifact(path="/srv/app"),))
        oracle = Oracle(ref=ref, hidden={}, tests=plan, expected=(), solution={}, verifier=own)
        pairs.append((task, oracle))
    write_suite("mine", tmp_path / "suites" / "mine", pairs, "made by a test")
    return ["images", "pull", "--suite", "mine", "--set", f"tasks.dir={tmp_path / 'suites'}"]


def here(tmp_path: Path, registry: Registry) -> list[str]:
    places = ("--registry", f"docker.io={registry.host}/mirror", "--registry", f"ghcr.io/org={registry.host}/own")
    insecure = f'environment.insecure_registries=["{registry.host}"]'
    return [*places, "--set", insecure, "--set", f"environment.cache_dir={tmp_path / 'cache'}"]


def test_images_come_from_the_registry_that_replaces_theirs(tmp_path: Path, registry: Registry) -> None:
    words = [*suite(tmp_path), *here(tmp_path, registry)]
    for reference, contents in IMAGES.items():
        if contents != b"verifier":
            registry.add(reference.replace("docker.io", "mirror"), contents)
    assert main(words) == 1, "the verifier's image is not there yet"
    cache = tmp_path / "cache"
    stored = {image.tags[0]: image for image in imported.images(cache)}
    assert set(stored) == set(IMAGES) - {"ghcr.io/org/verifier:2"}, "both images, although their names are equal"
    fetched = registry.fetched()
    assert fetched == 2
    registry.add("own/verifier:2", b"verifier")
    assert main(words) == 0
    for reference in IMAGES:
        image = imported.find(cache, reference)
        assert image is not None and image.segments()
    assert registry.fetched() == fetched, "the store has the layer, and the other images are not pulled again"


@pytest.mark.slow
def test_a_killed_pull_is_continued(tmp_path: Path, registry: Registry) -> None:
    words = [*suite(tmp_path), *here(tmp_path, registry)]
    for reference, contents in IMAGES.items():
        registry.add(reference.replace("docker.io", "mirror").replace("ghcr.io/org", "own"), contents)
    pulling = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", *words], stderr=subprocess.PIPE, start_new_session=True
    )
    assert pulling.stderr is not None
    while b": stored" not in pulling.stderr.readline():
        assert pulling.poll() is None
    os.killpg(pulling.pid, signal.SIGKILL)
    pulling.wait()
    pulling.stderr.close()
    kept = {image.tags[0] for image in imported.images(tmp_path / "cache")}
    assert kept
    assert main(words) == 0
    assert {image.tags[0] for image in imported.images(tmp_path / "cache")} == set(IMAGES)


def test_what_is_no_replacement_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--registry", "docker.io"], ["--registry", "=x"], ["--registry", "a=b", "--registry", "a=c"]):
        assert main([*suite(tmp_path), *words]) == 2
        assert "--registry expects FROM=TO" in capsys.readouterr().err
    assert main(["images", "app.tar", "--suite", "mine"]) == 2
