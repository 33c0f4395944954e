"""The image store: container images as read-only blobs that machines attach as drives, one per chain of layers.

A chain is a run of layers from the bottom of an image. Its id is that of the OCI image specification ("Layer ChainID"),
so equal layers have equal ids wherever they came from. A segment of a chain is one blob, an EROFS file system that lies
over the segments below it (overlayfs). An image is at most `DRIVES` segments: what it shares with other images, and the
rest. The shared part of two images is found when the second one is stored, and the first one is then split as well.

A segment is a folder ``layers-<chain>-<chain below>``: ``blob``, read-only and padded with a hole to the size of every
drive; ``tree``, an index of all paths down to the bottom, with the places of their contents in the blobs; and
``segment.json``. It appears whole or not at all, and never changes.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from headrace.vmhost.images import erofs
from headrace.vmhost.images.rootfs import Tree

DRIVES = 3
"""Largest number of segments of an image. A machine has a read-only drive for each, and one for a harness."""
DRIVE_BYTES = 64 << 30
"""Size of every drive; blobs are padded to it, because a template knows its drives' sizes."""
SHARED = 1 << 20
"""Bytes that a shared chain must have for a segment of its own."""


class LayerSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One blob of a chain."""

    chain: str
    below: tuple[str, ...]
    """Chain ids of the segments below it, the bottom first."""
    blob: str
    """SHA-256 of the blob's `bytes`."""
    bytes: int
    """Size of the file system; a hole follows."""
    folder: str = ""

    @property
    def path(self) -> Path:
        """The blob."""
        return Path(self.folder) / "blob"


def chains(diffs: Sequence[str]) -> tuple[str, ...]:
    """The chain id after each layer, from the digests of the layers' contents."""
    out: list[str] = []
    for diff in diffs:
        out.append(diff if not out else f"sha256:{hashlib.sha256(f'{out[-1]} {diff}'.encode()).hexdigest()}")
    return tuple(out)


def _folder(store: Path, chain: str, below: Sequence[str]) -> Path:
    short = chain.removeprefix("sha256:")[:16]
    return store / f"layers-{short}-{below[-1].removeprefix('sha256:')[:16] if below else 'none'}"


def segment(store: Path, chain: str, below: Sequence[str]) -> LayerSegment | None:
    """A stored segment; None where there is none, or a damaged one."""
    folder = _folder(store, chain, below)
    try:
        stored = msgspec.json.decode((folder / "segment.json").read_bytes(), type=LayerSegment)
        whole = (folder / "blob").stat().st_size == DRIVE_BYTES and (folder / "tree").stat().st_size > 0
    except (OSError, msgspec.DecodeError):
        return None
    if not whole or (stored.chain, stored.below) != (chain, tuple(below)):
        return None
    return msgspec.structs.replace(stored, folder=str(folder))


def segments(store: Path, boundaries: Sequence[str]) -> list[LayerSegment] | None:
    """The segments of an image, the bottom first; None when one is missing."""
    parts = [segment(store, chain, boundaries[:number]) for number, chain in enumerate(boundaries)]
    return None if None in parts or not parts else cast(list[LayerSegment], parts)


def intact(part: LayerSegment) -> bool:
    """Whether a blob's contents are those that were stored. Reads all of it."""
    digest = hashlib.sha256()
    try:
        with part.path.open("rb") as blob:
            for piece in erofs.pieces(blob, ((0, part.bytes),)):
                digest.update(piece)
    except OSError:
        return False
    return digest.hexdigest() == part.blob


Known = tuple[tuple[str, ...], tuple[str, ...]]


class Builder:
    """Makes the segments of one image while its layers are applied to a tree."""

    def __init__(self, store: Path, making: Path, tree: Tree, stack: ExitStack, stored: Sequence[Known]) -> None:
        """stored: layers and boundaries of the stored images."""
        self._store, self._making, self._tree, self._stack, self._known = store, making, tree, stack, stored
        self._below: list[str] = []
        self._before: frozenset[str] = frozenset()
        self._first = 0
        """The first layer that no finished segment holds."""
        self.layers: tuple[str, ...] = ()
        self._cuts: set[int] = set()
        self.shared = 0
        """Layers of a new segment that other images share."""

    @property
    def boundaries(self) -> tuple[str, ...]:
        """Chain ids of the finished segments."""
        return tuple(self._below)

    def begin(self, diffs: Sequence[str]) -> int:
        """Decide where the segments end. Returns the number of layers that the store has already."""
        self.layers = chains(diffs)
        best: tuple[str, ...] = ()
        common = 0
        for layers, boundaries in self._known:
            same = sum(1 for mine, theirs in zip(self.layers, layers, strict=False) if mine == theirs)
            common = max(common, same)
            ends = [boundaries[: n + 1] for n, end in enumerate(boundaries) if end in self.layers[:same]]
            for upto in ends:
                fits = len(upto) < DRIVES or upto[-1] == self.layers[-1]
                if fits and self._deeper(upto, best) and segments(self._store, upto):
                    best = upto
        if best:
            self._first = self.layers.index(best[-1]) + 1
            self._below = list(best)
            self._load(best)
        if self._first < common < len(self.layers) and len(best) + 2 <= DRIVES:
            self._cuts.add(common)
            self.shared = common
        return self._first

    def _deeper(self, upto: tuple[str, ...], best: tuple[str, ...]) -> bool:
        return not best or self.layers.index(upto[-1]) > self.layers.index(best[-1])

    def _load(self, boundaries: Sequence[str]) -> None:
        parts = segments(self._store, boundaries)
        assert parts is not None
        blobs: list[BinaryIO] = [self._stack.enter_context(part.path.open("rb")) for part in parts]
        self._tree.load((Path(parts[-1].folder) / "tree").read_bytes(), blobs)
        self._before = self._tree.paths()

    def after(self, number: int) -> None:
        """A layer was applied: end a segment where one ends. number: from 0."""
        end = number + 1
        if end not in self._cuts:
            return
        if self._tree.size() < SHARED:
            self.shared = 0
            return
        self._end(self.layers[number], end)

    def finish(self) -> None:
        """All layers were applied: end the last segment. Without layers the chain id is the digest of the blob."""
        if not self.layers or self._first < len(self.layers):
            self._end(self.layers[-1] if self.layers else "", len(self.layers))
        self.layers = self.layers or self.boundaries

    def _end(self, chain: str, layers: int) -> None:
        made = build(self._store, self._making, self._tree, self._first, self._before, chain, self._below)
        self._tree.files.append(self._stack.enter_context(made.path.open("rb")))
        self._below.append(made.chain)
        self._before = self._tree.paths()
        self._first = layers


def build(
    store: Path, making: Path, tree: Tree, first: int, before: frozenset[str], chain: str, below: Sequence[str]
) -> LayerSegment:
    """Write the layers from `first` on as a segment, move the tree's contents into its blob, and put it into the store.
    An empty chain id stands for the digest of the blob. OSError."""
    work = making / f"layers-{len(below)}"
    work.mkdir()
    top, inodes = tree.part(first, before)
    with (work / "blob").open("w+b") as blob:
        places = erofs.write(blob, top)
        size = blob.tell()
        if size > DRIVE_BYTES:
            raise OSError(27, f"its layers take {size >> 20} MiB and a drive holds {DRIVE_BYTES >> 20}")
        blob.seek(0)
        digest = hashlib.file_digest(blob, "sha256").hexdigest()
        blob.truncate(DRIVE_BYTES)
    number = len(below) + 1
    for identity, inode in inodes.items():
        inode.file, inode.places = number, places[identity]
    (work / "tree").write_bytes(tree.save())
    chain = chain or f"sha256:{digest}"
    made = LayerSegment(chain=chain, below=tuple(below), blob=digest, bytes=size)
    (work / "segment.json").write_bytes(msgspec.json.format(msgspec.json.encode(made)))
    for name in ("blob", "tree", "segment.json"):
        (work / name).chmod(0o444)
    folder = _folder(store, chain, below)
    if segment(store, chain, below) is None:
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    else:  # another process stored it meanwhile
        shutil.rmtree(work)
    return msgspec.structs.replace(made, folder=str(folder))


def split(store: Path, making: Path, layers: Sequence[str], boundaries: Sequence[str], at: int) -> tuple[str, ...]:
    """Divide the single segment of an image where a stored segment of its first `at` layers ends; the new boundaries.
    OSError."""
    below = [layers[at - 1]]
    with ExitStack() as stack:
        lower = segments(store, below)
        whole = segments(store, boundaries)
        if lower is None or whole is None:
            return tuple(boundaries)
        spool = stack.enter_context((making / "none").open("w+b"))
        under, tree = Tree(spool), Tree(spool)
        under.load((Path(lower[0].folder) / "tree").read_bytes(), ())
        blobs: list[BinaryIO] = [stack.enter_context(part.path.open("rb")) for part in whole]
        tree.load((Path(whole[-1].folder) / "tree").read_bytes(), blobs)
        tree.rest_on(under, stack.enter_context(lower[0].path.open("rb")), at)
        build(store, making, tree, at, under.paths(), layers[-1], below)
    return (*below, layers[-1])


def open_blobs(parts: Sequence[LayerSegment]) -> list[int]:
    """Descriptors of the blobs, for a machine. OSError."""
    fds: list[int] = []
    try:
        for part in parts:
            fds.append(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return fds
