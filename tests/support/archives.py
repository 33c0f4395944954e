"""Container images that tests make themselves: layers from lists of members, archives as docker and OCI write them."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def file(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, data=data, **fields)


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.DIRTYPE, **fields)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind, linkname=target)


Members = Sequence[tuple[tarfile.TarInfo, bytes]]


def layer(members: Members) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def configuration(layers: Sequence[bytes], architecture: str = "amd64", **config: Any) -> bytes:
    diffs = [sha(content) for content in layers]
    rootfs = {"type": "layers", "diff_ids": diffs}
    return json.dumps({"os": "linux", "architecture": architecture, "config": config, "rootfs": rootfs}).encode()


def packed(data: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if how == "zstd" else data


def _layer_kind(how: str) -> str:
    return "application/vnd.oci.image.layer.v1.tar" + (f"+{how}" if how else "")


class Layout:
    """An OCI layout in the making: files by name."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        self.index: list[dict[str, Any]] = []

    def blob(self, data: bytes, kind: str = "") -> dict[str, Any]:
        self.files[f"blobs/sha256/{sha(data)[7:]}"] = data
        return {"mediaType": kind, "digest": sha(data), "size": len(data)}

    def image(
        self, layers: Sequence[Members], tag: str = "", how: str = "", arch: str = "amd64", **config: Any
    ) -> None:
        plain = [layer(content) for content in layers]
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(configuration(plain, arch, **config), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(packed(content, how), _layer_kind(how)) for content in plain],
        }
        notes = {"org.opencontainers.image.ref.name": tag} if tag else {}
        kind = "application/vnd.oci.image.manifest.v1+json"
        entry = self.blob(json.dumps(manifest).encode(), kind)
        self.index.append(entry | {"platform": {"os": "linux", "architecture": arch}, "annotations": notes})

    def nest(self) -> None:
        """Put what there is under an index of its own, as builders of several platforms do."""
        inner = json.dumps({"schemaVersion": 2, "manifests": self.index}).encode()
        self.index = [self.blob(inner, "application/vnd.oci.image.index.v1+json")]

    def all(self) -> dict[str, bytes]:
        return self.files | {"index.json": json.dumps({"schemaVersion": 2, "manifests": self.index}).encode()}

    def tar(self, path: Path, how: str = "") -> Path:
        path.write_bytes(packed(layer([file(name, data) for name, data in self.all().items()]), how))
        return path

    def folder(self, path: Path) -> Path:
        for name, data in self.all().items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return path


def docker_save(path: Path, layers: Sequence[Members], tags: Sequence[str] = ("app:1",), **config: Any) -> Path:
    """What `docker save` wrote before it wrote OCI layouts."""
    plain = [layer(content) for content in layers]
    config_data = configuration(plain, **config)
    name = f"{sha(config_data)[7:]}.json"
    files = {name: config_data} | {f"{sha(content)[7:]}/layer.tar": content for content in plain}
    entry = {"Config": name, "RepoTags": list(tags), "Layers": [f"{sha(content)[7:]}/layer.tar" for content in plain]}
    files["manifest.json"] = json.dumps([entry]).encode()
    path.write_bytes(layer([file(name, data) for name, data in files.items()]))
    return path
