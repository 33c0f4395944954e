"""Images of registries and of other stores on this machine: skopeo copies them into an OCI layout, which is imported.

skopeo is a program of its own (Debian package ``skopeo``) and knows the protocols, logins and certificates. Its sizes
are limited here: a registry's layers are added up before any is fetched, and no file may outgrow the largest of them.
The layout lies in the cache. It stays when a copy fails, so the next one fetches only what is missing.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from headrace import timed_commands
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported, store
from headrace.vmhost.images.imported import Image, Request
from headrace.vmhost.images.rootfs import Tree

PROGRAM = "skopeo"
REGISTRY = "docker://"
TRANSPORTS = ("docker-daemon:", "containers-storage:")
"""Other stores of this machine that `headrace images` reads."""
_PLATFORM = ("--override-os", "linux", "--override-arch", "amd64")
_RETRIES = ("--retry-times", "4")
"""Repeats of a request that failed; skopeo waits longer before each."""
_DOCUMENT = 16 << 20
"""Bytes of the largest manifest or configuration."""


class Copying(msgspec.Struct, frozen=True, kw_only=True):
    """How skopeo copies."""

    insecure: tuple[str, ...] = ()
    """Registries (``HOST:PORT``) that may answer without TLS, or with a certificate that nobody signed."""
    timeout_s: float = 3600.0
    """Limit of the whole copy."""
    places: Mapping[str, str] = {}
    """Start of a reference (``docker.io/org``) to where it is copied from (``mirror:5000/org``); the longest counts."""

    def place(self, reference: str) -> str:
        """Where a reference is copied from. The image keeps its reference, by which tasks name it."""
        starts = [start for start in self.places if re.match(rf"{re.escape(start)}(?![^/:@])", reference)]
        if not starts:
            return reference
        start = max(starts, key=len)
        return self.places[start] + reference[len(start) :]


class _Blob(msgspec.Struct):
    digest: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Index(msgspec.Struct):
    manifests: list[_Blob]


class _Manifest(msgspec.Struct):
    config: _Blob
    layers: list[_Blob]


class _Asked(msgspec.Struct, rename="pascal"):
    digest: str
    layers: list[str] | None


class _Contents(msgspec.Struct):
    diff_ids: list[str]


class _Config(msgspec.Struct):
    rootfs: _Contents


def take(cache: Path, source: str, request: Request, copying: Copying, say: Callable[[str], None]) -> Image:
    """Import an image of a registry (``docker.io/org/app:1``) or of another store (``docker-daemon:app:1``). Blocks;
    VmhostError with skopeo's reason. say: gets a line before layers are fetched."""
    if shutil.which(PROGRAM) is None:
        raise VmhostError(f"{PROGRAM} is not installed: apt-get install {PROGRAM}, or import the output of docker save")
    local = source.startswith(TRANSPORTS)
    reference = source.partition(":")[2].rpartition("]")[2].strip("/") if local else _reference(source)
    try:
        with _layout(cache, source if local else reference) as layout:
            copy = _Copy(layout, reference, copying)
            if local:
                copy.run(source, imported.LARGEST)
            else:
                copy.registry(cache, say)
            try:
                return imported.take(cache, layout, request.name, "", request.memory_mb, reference)
            finally:
                shutil.rmtree(layout)  # also a damaged one: the next copy must not find its layers
    except OSError as error:
        raise VmhostError(f"{reference} can't be imported: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise VmhostError(f"{reference} can't be imported: its manifest cannot be read: {error}") from None


def take_all(
    cache: Path, references: Sequence[str], copying: Copying, parallel: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Import images of registries that the store lacks. Returns the reason of each that could not be.

    Each gets a name of its own, because registries may have equal ones. The first two are copied one by one: the
    store then knows the layers that all share.
    """

    def one(reference: str) -> str:
        stored = imported.find(cache, reference)
        if stored is not None and store.segments(cache, stored.boundaries):
            return ""
        marked = hashlib.sha256(reference.encode()).hexdigest()[:8]
        request = Request(name=f"{imported.name_of(reference)[:54]}-{marked}")
        try:
            take(cache, reference, request, copying, say)
        except VmhostError as error:
            return str(error)
        say(f"{reference}: stored")
        return ""

    with ThreadPoolExecutor(parallel) as pool:
        reasons = [*map(one, references[:2]), *pool.map(one, references[2:])]
    return {reference: reason for reference, reason in zip(references, reasons, strict=True) if reason}


def _reference(text: str) -> str:
    """A reference with registry, and with a tag or a digest. VmhostError when the text is none."""
    name, at, digest = imported.full(text).partition("@")
    place, _, tag = name.rpartition(":")
    repository = name if "/" in tag else place
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository.partition("/")[2]):
        raise VmhostError(f"expected an image such as docker.io/org/app:1.2, got {text!r}")
    return f"{repository}@{digest}" if at else name


@contextmanager
def _layout(cache: Path, source: str) -> Iterator[Path]:
    """The folder of a source's copy, held against other processes."""
    place = cache / "downloads" / hashlib.sha256(source.encode()).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (place / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        yield place


class _Copy:
    """One source's copy into a layout."""

    def __init__(self, layout: Path, reference: str, copying: Copying) -> None:
        self._layout, self._reference, self._copying = layout, reference, copying
        self._ends = time.monotonic() + copying.timeout_s
        self._from = copying.place(reference)
        self._checked = str(self._from.partition("/")[0] not in copying.insecure).lower()
        self._places = layout / "blobs" / "sha256"

    def registry(self, cache: Path, say: Callable[[str], None]) -> None:
        """Copy an image of a registry, without the layers that the store has. VmhostError, msgspec.DecodeError.

        An empty file under a layer's name stands for the layer: with such files skopeo fetches the manifest and the
        configuration alone, which say what is missing.
        """
        inspect = ["inspect", "--no-tags", f"--tls-verify={self._checked}", f"{REGISTRY}{self._from}"]
        asked = msgspec.json.decode(self._skopeo(inspect, _DOCUMENT), type=_Asked)
        layers = [msgspec.convert({"digest": digest}, _Blob) for digest in asked.layers or ()]
        for left in self._places.iterdir():
            if not left.stat().st_size:
                left.unlink()
        for layer in layers:
            self._place(layer).touch()
        repository = re.sub(r":[^/:]*$", "", self._from.partition("@")[0])
        source = f"{REGISTRY}{repository}@{asked.digest}"  # the tag may move meanwhile
        self.run(source, _DOCUMENT)
        missing = self._missing(cache)
        if missing:
            size = sum(layer.size for layer in missing)
            say(f"{self._reference}: fetching {len(missing)} of {len(layers)} layers, {size / (1 << 20):.1f} MiB")
            for layer in missing:
                self._place(layer).unlink()
            self.run(source, max(_DOCUMENT, *(layer.size for layer in missing)))

    def run(self, source: str, most: int) -> None:
        """Copy what the layout lacks. most: bytes of the largest file. VmhostError."""
        words = ["copy", "--quiet", f"--src-tls-verify={self._checked}", "--dest-oci-accept-uncompressed-layers"]
        self._skopeo([*words, source, f"oci:.:{self._reference}"], most)

    def _skopeo(self, words: list[str], most: int) -> bytes:
        """Run skopeo in the layout's folder; its standard output."""
        limit_s = max(1.0, self._ends - time.monotonic())
        command = ["prlimit", f"--fsize={most}", PROGRAM, *_PLATFORM, "--tmpdir", ".", words[0], *_RETRIES, *words[1:]]
        try:
            done = timed_commands.run(command, limit_s, cwd=self._layout)
        except subprocess.TimeoutExpired:
            raise VmhostError(
                f"{self._reference} can't be imported: {PROGRAM} did not end within {self._copying.timeout_s:g} s "
                "(--timeout-s); the next copy goes on"
            ) from None
        if done.returncode:
            raise VmhostError(f"{self._reference} can't be imported: {_reason(done.stderr)}")
        return done.stdout

    def _place(self, blob: _Blob) -> Path:
        return self._places / blob.digest.removeprefix("sha256:")

    def _missing(self, cache: Path) -> list[_Blob]:
        """The layers that neither the store nor an earlier copy has. VmhostError when they are too large."""
        (entry,) = msgspec.json.decode((self._layout / "index.json").read_bytes(), type=_Index).manifests
        manifest = msgspec.json.decode(self._place(entry).read_bytes(), type=_Manifest)
        config = msgspec.json.decode(self._place(manifest.config).read_bytes(), type=_Config)
        stored_images = [(image.layers, image.boundaries) for image in imported.images(cache)]
        with ExitStack() as stack, open(os.devnull, "w+b") as spool:
            builder = store.Builder(cache, cache, Tree(spool), stack, stored_images)
            layers = manifest.layers[builder.begin(config.rootfs.diff_ids) :]
        missing = {layer.digest: layer for layer in layers if not self._place(layer).stat().st_size}
        size, free = sum(layer.size for layer in missing.values()), shutil.disk_usage(cache).free
        if size > min(free, imported.LARGEST):
            raise VmhostError(
                f"{self._reference} can't be imported: its layers have {size >> 20} MiB; expected at most "
                f"{imported.LARGEST >> 20} MiB, and {free >> 20} MiB are free below {cache}"
            )
        return list(missing.values())


def _reason(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    text = (lines or ["skopeo gave no reason"])[-1]
    message = re.search(r'msg="((?:[^"\\]|\\.)*)"', text)
    text = re.sub(r'\\(["\\])', r"\1", message[1].replace("\\n", " ") if message else text)[:400]
    if "file too large" in text:
        return f"a file is larger than its manifest says: {text}"
    if "unauthorized" in text or "authentication required" in text:
        return f"{text}; it needs credentials: run skopeo login or docker login"
    return text
