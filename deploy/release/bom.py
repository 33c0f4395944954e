"""The bill of materials of the container image (CycloneDX 1.6): Debian's packages by dpkg's own record, and the wheels.

The SBOM of `make release` lists the Python packages beside a wheel. Debian's packages are known only once the image's
root is made, and their versions are those of Debian's archive on that day, so they are read from the root itself.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

STATUS = "var/lib/dpkg/status"
LABEL = "headrace.debian."
"""Prefix of the image's labels that hold the version of one Debian package."""


class DebianPackage(NamedTuple):
    """An installed package, with dpkg's words."""

    name: str
    version: str
    architecture: str


def debian_packages(root: Path) -> list[DebianPackage]:
    """The packages that are installed in a root archive, sorted. SystemExit where it has no record of dpkg."""
    with tarfile.open(root) as tar:
        for entry in tar:
            if entry.name.removeprefix("./") == STATUS and (file := tar.extractfile(entry)) is not None:
                return sorted(_installed(file.read().decode()))
    raise SystemExit(f"image: {root} has no {STATUS}: expected a root that mmdebstrap made")


def _installed(status: str) -> Iterable[DebianPackage]:
    for paragraph in status.split("\n\n"):
        lines = (line.partition(": ") for line in paragraph.splitlines() if not line.startswith(" "))
        fields = {name: value for name, _, value in lines}
        if fields.get("Status", "").endswith(" installed"):
            yield DebianPackage(fields["Package"], fields["Version"], fields["Architecture"])


def labels(debian: Sequence[DebianPackage], named: Sequence[str], version: str, commit: str) -> dict[str, str]:
    """The image's labels. named: the Debian packages that have a label each; the bill of materials has all of them."""
    versions = {package.name: package.version for package in debian}
    return {
        "org.opencontainers.image.title": "headrace",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": commit,
    } | {f"{LABEL}{name}": versions[name] for name in named}


def document(
    debian: Sequence[DebianPackage], wheels: Iterable[Path], *, version: str, commit: str, moment: int, release: str
) -> bytes:
    """The bill as JSON. wheels: of the image's Python packages. moment: seconds since the epoch. release: Debian's."""
    components = [_debian(package, release) for package in debian]
    components += [_python(wheel) for wheel in sorted(wheels)]
    subject = {
        "type": "container",
        "bom-ref": "image",
        "name": "headrace",
        "version": version,
        "properties": [{"name": "headrace:commit", "value": commit}],
    }
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": datetime.fromtimestamp(moment, UTC).isoformat(), "component": subject},
        "components": components,
    }
    return (json.dumps(bill, indent=2) + "\n").encode()


def _debian(package: DebianPackage, release: str) -> dict[str, Any]:
    name, version, architecture = package
    place = f"{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}&distro={release}"
    return _component(name, version, f"pkg:deb/debian/{place}")


def _python(wheel: Path) -> dict[str, Any]:
    name, version = wheel.name.split("-")[:2]
    name = name.lower().replace("_", "-")
    content = hashlib.sha256(wheel.read_bytes()).hexdigest()
    part = _component(name, version, f"pkg:pypi/{name}@{quote(version, safe='')}")
    return part | {"hashes": [{"alg": "SHA-256", "content": content}]}


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
