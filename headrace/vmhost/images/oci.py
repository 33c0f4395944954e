"""Container images as files: the output of `docker save`, and the OCI image layout, as an archive or as a folder.

Every blob is read once, its digest checked against the name that led to it (OCI image specification 1.1, "Content
Descriptors"), and every layer's contents against the configuration's ``diff_ids``. Of several platforms linux/amd64 is
taken, of several images the one whose tag was asked for.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec
import zstandard

from headrace.archives import tars
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge
from headrace.vmhost.images.rootfs import BadImage, Tree
from headrace.vmhost.images.store import Builder

_BLOB_JSON = 16 << 20
"""Largest manifest or configuration, in bytes."""
_OUTER = 8 << 30
"""Bytes that a compressed archive may unpack to."""
_TAGS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_FILES = 1 << 21
_LAYERS = 1000
"""More than any machine can mount."""
BROKEN = (
    *(error for error in tars.DAMAGED if error is not OSError),
    gzip.BadGzipFile,
    zstandard.ZstdError,
    AttributeError,
    ArchiveRefused,
)
"""Errors that damaged and forged images raise. An OSError may also come from this host's disk."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The image's own settings for its programs."""

    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    digest: str = ""
    """Digest of the configuration, or of the contents where there is no configuration."""


class _Place(NamedTuple):
    """Where a file of an archive lies in it."""

    offset: int
    size: int
    target: str
    """The target of a symbolic link; empty for a file."""


class _Part(io.RawIOBase):
    """A file of an archive."""

    def __init__(self, archive: IO[bytes], place: _Place) -> None:
        self._archive, self._at, self._end = archive, place.offset, place.offset + place.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._archive.seek(self._at)
        data = self._archive.read(min(len(buffer), self._end - self._at))
        self._at += len(data)
        buffer[: len(data)] = data
        return len(data)


class Source:
    """A folder or an archive, by the names of its files."""

    def __init__(self, path: Path, stack: ExitStack, spool: IO[bytes]) -> None:
        self._folder = path if path.is_dir() else None
        self._archive: IO[bytes] | None = None
        self._places: dict[str, _Place] = {}
        if self._folder is None:
            file = stack.enter_context(path.open("rb"))
            plain = _plain(file)
            if plain is not file:  # a compressed archive cannot be read in any order, so it is unpacked once
                _copy(plain, spool)
                spool.seek(0)
                file = cast(Any, spool)
            self._archive = file
            for info, content in self.entries():
                if content is not None or info.issym():
                    place = _Place(info.offset_data, info.size, info.linkname if info.issym() else "")
                    self._places[_clean(info.name)] = place

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self._folder / name).is_file() if self._folder else _clean(name) in self._places

    def open(self, name: str) -> IO[bytes]:
        """A file's content. BadImage when it is missing."""
        if self._folder is not None:
            file = self._folder / name
            if not file.is_file() or not file.resolve().is_relative_to(self._folder.resolve()):
                raise BadImage(f"it has no {name}")
            return file.open("rb")
        assert self._archive is not None
        place = self._places.get(_clean(name))
        if place is not None and place.target:  # older versions of `docker save` write equal layers once
            place = self._places.get(_clean(f"{name.rpartition('/')[0]}/{place.target}"))
        if place is None or place.target:
            raise BadImage(f"it has no {name}")
        return cast(IO[bytes], _Part(self._archive, place))

    def json(self, name: str, digest: str = "") -> Any:
        """A small file as JSON, its digest checked."""
        with self.open(name) as file:
            data = file.read(_BLOB_JSON + 1)
        if len(data) > _BLOB_JSON:
            raise BadImage(f"{name} is larger than any manifest")
        if digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise BadImage(f"{name} is damaged: its digest is not {digest}")
        return json.loads(data)

    def entries(self) -> Iterator[tars.Entry]:
        """The archive's own members, which are those of an archive that is a bare root file system. ArchiveRefused."""
        assert self._archive is not None
        self._archive.seek(0)
        return tars.entries(self._archive, ArchiveLimits(_FILES, _OUTER), packed=False)


class _Hashing(io.RawIOBase):
    """Passes reads to another file, and computes the SHA-256 of the data."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._inner.read(len(buffer))
        self.digest.update(data)
        buffer[: len(data)] = data
        return len(data)

    def finish(self) -> str:
        """Read to the end: the digest of all of it."""
        while self.read(1 << 20):
            pass
        return f"sha256:{self.digest.hexdigest()}"


def is_image(source: Source) -> bool:
    """Whether a source is a container image rather than a bare root file system."""
    return source.has("oci-layout") or source.has("index.json") or source.has("manifest.json")


def read(source: Source, tree: Tree, tag: str, builder: Builder) -> Settings:
    """Apply the layers of the image with that tag to the tree. BadImage."""
    if source.has("index.json"):
        manifest, tags = _choose(source, tag)
        config = manifest["config"]["digest"]
        layers = [(_blob(layer["digest"]), layer["digest"]) for layer in manifest["layers"]]
        return _apply(source, (_blob(config), config), layers, tags, tree, builder)
    images = source.json("manifest.json")
    matching = [image for image in images if not tag or tag in (image.get("RepoTags") or ())]
    names = [name for image in images for name in image.get("RepoTags") or ()]
    if len(matching) != 1:
        raise _which(tag, names)
    name = matching[0]["Config"]
    stem = name.rpartition("/")[2].removesuffix(".json")
    named = name, f"sha256:{stem}" if len(stem) == 64 else ""
    layers = [(name, "") for name in matching[0]["Layers"]]
    return _apply(source, named, layers, tuple(matching[0].get("RepoTags") or ()), tree, builder)


def _apply(
    source: Source,
    named: tuple[str, str],
    layers: list[tuple[str, str]],
    tags: tuple[str, ...],
    tree: Tree,
    builder: Builder,
) -> Settings:
    """named: name and digest of the configuration; layers: those of each layer."""
    config = source.json(*named)
    platform = (config.get("os", "linux"), config.get("architecture", "amd64"))
    if platform != ("linux", "amd64"):
        raise BadImage(f"it is made for {'/'.join(platform)}; machines here are linux/amd64")
    wanted = config["rootfs"]["diff_ids"]
    if len(wanted) != len(layers):
        raise BadImage(f"it has {len(layers)} layers where its configuration names {len(wanted)}")
    if len(layers) > _LAYERS:
        raise BadImage(f"it has {len(layers)} layers; expected at most {_LAYERS}")
    present = builder.begin(wanted)
    for number, ((name, digest), diff) in enumerate(zip(layers, wanted, strict=True)):
        if number < present:
            continue
        _layer(source, tree, number, name, digest, diff)
        builder.after(number)
    return _settings(config.get("config") or {}, tags, named[1] or f"sha256:{_sha(config)}")


def _choose(source: Source, tag: str) -> tuple[Any, tuple[str, ...]]:
    """The manifest of a tag for linux/amd64, and its tags."""
    layers: dict[str, list[str]] = {}
    names: list[str] = []

    def walk(entries: list[Any], inherited: str, depth: int) -> None:
        if depth > 4:
            raise BadImage("its indexes are nested more than 4 deep")
        for entry in entries:
            notes = entry.get("annotations") or {}
            name = next((notes[key] for key in _TAGS if key in notes), inherited)
            if "index" in entry.get("mediaType", "") or "manifest.list" in entry.get("mediaType", ""):
                walk(source.json(_blob(entry["digest"]), entry["digest"])["manifests"], name, depth + 1)
                continue
            platform = entry.get("platform") or {}
            if (platform.get("os", "linux"), platform.get("architecture", "amd64")) != ("linux", "amd64"):
                continue
            if "vnd.docker.reference.type" in notes:  # an attestation about another image
                continue
            if name:
                names.append(name)
            short = any(notes.get(key) == tag for key in _TAGS)
            if not tag or name == tag or short or name.endswith(f"/{tag}"):
                layers.setdefault(entry["digest"], []).append(name)

    walk(source.json("index.json")["manifests"], "", 0)
    if len(layers) != 1:
        raise _which(tag, names)
    ((digest, tags),) = layers.items()
    return source.json(_blob(digest), digest), tuple(name for name in tags if name)


def _which(tag: str, names: list[str]) -> BadImage:
    available = ", ".join(dict.fromkeys(names)) or "none with a tag"
    if tag:
        return BadImage(f"it has no image {tag!r} for linux/amd64; it has {available}")
    if not names:
        return BadImage("it has no image for linux/amd64")
    return BadImage(f"it has several images, say which with --tag: {available}")


def _layer(source: Source, tree: Tree, number: int, name: str, digest: str, diff: str) -> None:
    with source.open(name) as blob:
        packed = _Hashing(blob)
        with io.BufferedReader(packed, 1 << 20) as stream:
            plain = _Hashing(_plain(stream))
            try:
                content = io.BufferedReader(plain, 1 << 20)
                tree.add_tar(tars.entries(content, tree.limits, packed=False), number)
                same = plain.finish() == diff
                packed_digest = packed.finish()
            except ArchiveTooLarge as error:
                raise BadImage(f"layer {number + 1}: {error}") from None
            except BROKEN as error:
                raise BadImage(f"layer {number + 1} is damaged: {error}") from None
    if not same:
        raise BadImage(f"layer {number + 1} is damaged: its contents are not {diff}")
    if digest and packed_digest != digest:
        raise BadImage(f"layer {number + 1} is damaged: its digest is not {digest}")


def _plain(stream: Any) -> IO[bytes]:
    """The decompressed stream. The format comes from its first bytes, not from its media type."""
    if hasattr(stream, "peek"):
        magic = stream.peek(4)[:4]
    else:
        magic = stream.read(4)
        stream.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if magic == b"\x28\xb5\x2f\xfd":
        return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return cast(IO[bytes], stream)


def _settings(config: dict[str, Any], tags: tuple[str, ...], digest: str) -> Settings:
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    values = {
        "env": env,
        "user": config.get("User") or "",
        "workdir": config.get("WorkingDir") or "",
        "entrypoint": config.get("Entrypoint") or (),
        "cmd": config.get("Cmd") or (),
        "tags": tags,
        "digest": digest,
    }
    return msgspec.convert(values, Settings)


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _blob(digest: str) -> str:
    kind, _, name = digest.partition(":")
    if kind != "sha256" or len(name) != 64 or not name.isalnum():
        raise BadImage(f"it names a blob {digest!r}; only sha256 is known here")
    return f"blobs/sha256/{name}"


def _clean(name: str) -> str:
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while piece := source.read(1 << 20):
        if target.tell() > _OUTER:
            raise BadImage(f"it unpacks to more than {_OUTER >> 20} MiB")
        target.write(piece)
