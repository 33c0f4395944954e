"""`make release` twice from one commit gives equal files, and the image of `make image` runs as its own user."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import parser
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="builds a commit"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("build", "cyclonedx_py")),
        reason="needs pip install 'headrace[release]'",
    ),
]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_two_builds_of_one_commit_are_equal(tmp_path: Path) -> None:
    # Not HEAD, which others may move meanwhile.
    commit = git("rev-list", "--max-count=2", "HEAD").split()[-1]
    for folder in ("one", "two"):
        words = [sys.executable, str(ROOT / "deploy/release/build.py"), "--out", str(tmp_path / folder)]
        words += ["--commit", commit]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    first, second = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert first == second
    assert any(name.startswith(f"headrace-{headrace.__version__}-") for name in first)
    kinds = sorted(name.removeprefix("headrace-").partition("-py3")[0] for name in first)
    assert len(first) == 4 and "SHA256SUMS" in kinds and "headrace.cdx.json" in kinds
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "one", check=True)
    with tarfile.open(next((tmp_path / "one").glob("*.tar.gz"))) as sdist:
        assert {entry.mtime for entry in sdist} == {int(git("log", "-1", "--format=%ct", commit))}
    parts = {part["name"].lower() for part in json.loads(first["headrace.cdx.json"])["components"]}
    assert {"msgspec", "torch", "nats-py"} <= parts


def test_wheel_image_and_tag_have_one_version(tmp_path: Path) -> None:
    commit, version = git("rev-parse", "HEAD"), headrace.__version__
    clone = tmp_path / "clone"
    git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone))
    git("-C", str(clone), "checkout", "--quiet", commit)
    git("-C", str(clone), "tag", "v99.0.0", commit)
    words = [sys.executable, str(clone / "deploy/release/build.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "dist").exists()
    assert f"is tagged v99.0.0 and its version is {version}: set __version__" in done.stderr
    defaults = parser().parse_args(["deploy", "k8s", "x", "--config", "y"])
    assert defaults.image == f"headrace:{version}"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("buildah") is None, reason="needs root and buildah")
def test_the_image_runs_as_its_user(tmp_path: Path) -> None:
    """One build, of minutes; the root of the image is what a registry's client would unpack."""
    words = [sys.executable, str(ROOT / "deploy/release/image.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["archive"].endswith(f"/headrace-{headrace.__version__}.oci.tar")
    bill = json.loads(Path(line["sbom"]).read_text())
    versions = {part["name"]: part["version"] for part in bill["components"]}
    assert {"msgspec", "torch", "nats-py", "libc6"} <= set(versions)
    store = ("buildah", "--storage-driver", "vfs", "--root", f"{tmp_path}/store", "--runroot", f"{tmp_path}/run")

    def buildah(*words: str) -> str:
        return subprocess.run([*store, *words], capture_output=True, text=True, check=True).stdout.strip()

    container = buildah("from", f"oci-archive:{line['archive']}")
    try:
        for words_inside, says in (
            (("id", "-u"), "10001"),
            (("headrace", "--version"), "headrace"),
            (("nats-server", "--version"), "nats-server: v2"),
            (("qemu-system-x86_64", "--version"), "QEMU emulator"),
            (("python", "-c", "import torch, headrace.cli.main; print(torch.__version__)"), "2."),
        ):
            assert says in buildah("run", "--isolation", "chroot", container, "--", *words_inside), words_inside
        query = ("dpkg-query", "-W", "-f", "${Version}", "qemu-system-x86")
        version = buildah("run", "--isolation", "chroot", container, "--", *query)
        labels = json.loads(buildah("inspect", container))["OCIv1"]["config"]["Labels"]
        assert version == versions["qemu-system-x86"] == labels["headrace.debian.qemu-system-x86"]
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")
