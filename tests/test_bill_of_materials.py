"""The image's bill of materials names the packages that dpkg has installed, with their versions."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_pins import release_script

RECORD = """Package: attr
Status: install ok installed
Architecture: amd64
Version: 1:2.5.1-4+b1
Description: a text
 Version: of the description

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""
FACTS = {"version": "1.2.3", "commit": "c0ffee", "moment": 1_700_000_000, "release": "bookworm"}


@pytest.fixture
def bom(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return release_script(monkeypatch, "bom")


def packed(folder: Path, record: Path) -> Path:
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(record, "./var/lib/dpkg/status")
    return archive


def test_debian_packages_and_wheels_have_versions_and_names_that_scanners_read(bom: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "status").write_text(RECORD)
    debian = bom.debian_packages(packed(tmp_path, tmp_path / "status"))
    assert debian == [("attr", "1:2.5.1-4+b1", "amd64")], "a package that was removed is not in the image"
    wheel = tmp_path / "nats_py-2.16.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    bill = json.loads(bom.document(debian, [wheel], **FACTS))
    assert [part["purl"] for part in bill["components"]] == [
        "pkg:deb/debian/attr@1%3A2.5.1-4%2Bb1?arch=amd64&distro=bookworm",
        "pkg:pypi/nats-py@2.16.0",
    ]
    assert bill["components"][0]["version"] == "1:2.5.1-4+b1"
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert bom.document(debian, [wheel], **FACTS) == bom.document(debian, [wheel], **FACTS)
    labels = bom.labels(debian, ["attr"], "1.2.3", "c0ffee")
    assert labels["headrace.debian.attr"] == "1:2.5.1-4+b1"
    assert labels["org.opencontainers.image.revision"] == "c0ffee"


def test_a_root_without_a_record_is_refused(bom: ModuleType, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "root.tar", "w"):
        pass
    with pytest.raises(SystemExit, match="has no var/lib/dpkg/status"):
        bom.debian_packages(tmp_path / "root.tar")


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs Debian")
def test_the_packages_of_this_machine_are_those_of_dpkg(bom: ModuleType, tmp_path: Path) -> None:
    asked = "${db:Status-Status} ${Package} ${Version} ${Architecture}\\n"
    listing = subprocess.run(["dpkg-query", "-W", "-f", asked], capture_output=True, text=True, check=True).stdout
    installed = [line.split(" ")[1:] for line in listing.splitlines() if line.startswith("installed ")]
    read = bom.debian_packages(packed(tmp_path, Path("/var/lib/dpkg/status")))
    assert len(read) > 50 and [list(package) for package in read] == sorted(installed)
