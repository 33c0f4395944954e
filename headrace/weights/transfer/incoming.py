"""The file of a full snapshot that arrives piece by piece, in any order and from any source.

The idea: the manifest, which the publisher signed, has a hash of every block. So the source of a byte does not matter:
a block is hashed when it arrives and written only when it has the manifest's hash. The file gets the version's name
when all blocks are there.

What has arrived stays on the disk when the fetch ends early, under a name of its own. The next fetch of the same state
hashes the blocks that it finds and fetches the others, so no list of arrived blocks has to be kept.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from headrace.messages.weights import TensorInfo, WeightManifest
from headrace.weights import shards as sharding
from headrace.weights import snapshot, state
from headrace.weights.receiving.staging import check_manifest
from headrace.weights.state import HASH_BYTES, Bits, Part

ARRIVING = ".*.arriving"
"""Names of files that are not complete."""
PIECE_BYTES = 16 << 20
"""Largest number of bytes that are fetched at once: those of the largest block."""


class Piece(NamedTuple):
    """Blocks that follow each other in a snapshot file."""

    parts: tuple[Part, ...]
    """`Part.tensor` is the index in the version's tensors."""
    bytes: int


def pieces(tensors: Sequence[TensorInfo], wanted: Sequence[bool]) -> list[Piece]:
    """The blocks of the wanted tensors in the order of a snapshot file, in runs of at most `PIECE_BYTES`.

    tensors: of the version, in name order. wanted: one entry per tensor. A run does not go across a tensor that is not
    wanted, so it is contiguous in a file of all tensors and in one of the wanted tensors.
    """
    blocks: dict[int, list[Part]] = {}
    number = 0
    for index, info in enumerate(tensors):
        for start, items in state.blocks(info):
            blocks.setdefault(index, []).append(Part(number, index, start, items))
            number += 1
    order = sorted(range(len(tensors)), key=lambda index: (-state.itemsize(tensors[index].dtype), tensors[index].name))
    out: list[Piece] = []
    running: list[Part] = []
    size = 0

    def close() -> None:
        nonlocal size
        if running:
            out.append(Piece(tuple(running), size))
        running.clear()
        size = 0

    for index in order:
        if not wanted[index]:
            close()
            continue
        width = state.unsigned(tensors[index].dtype).itemsize
        for part in blocks.get(index, ()):
            if size + part.items * width > PIECE_BYTES:
                close()
            running.append(part)
            size += part.items * width
    close()
    return out


class IncomingFile:
    """A context in which the file at `path` is completed. Call `open` first; then `missing` are the pieces that are not
    there yet."""

    def __init__(self, path: Path, manifest: WeightManifest, shards: frozenset[int] | None = None) -> None:
        """BrokenVersion for a contradictory manifest.

        shards: the file holds the tensors of these shards; None means all.
        """
        check_manifest(manifest)
        self.path, self.manifest = path, manifest
        self.state_hash = sharding.state_hash(manifest, shards)
        self.missing: list[Piece] = []
        self._wanted = [shards is None or info.shard in shards for info in manifest.tensors]
        here = [index for index, wants in enumerate(self._wanted) if wants]
        self._at = {index: place for place, index in enumerate(here)}
        """Index of a tensor in the version to its index in the file."""
        self._tensors = sharding.chosen(manifest.tensors, shards)
        self.names = frozenset(info.name for info in self._tensors)
        """The tensors of the file."""
        self._rows: snapshot.Arriving | None = None
        self._lock, self._closed = threading.Lock(), False
        """A thread may still be at work when the fetch is cancelled; the file is closed after it."""

    def open(self) -> None:
        """Hash what an earlier fetch left, or reserve the disk space; in a thread. OSError when the disk is full."""
        with self._lock:
            if self._closed:
                return
            self._rows = snapshot.Arriving(self.path.with_name(f".{self.state_hash}.arriving"), self._tensors)
            self.missing = pieces(self.manifest.tensors, self._wanted)
            if not self._rows.fresh:
                self.missing = [rest for piece in self.missing for rest in self._absent(piece)]

    def _kind(self, part: Part) -> "np.dtype[np.unsignedinteger]":
        return state.unsigned(self.manifest.tensors[part.tensor].dtype)

    def _good(self, part: Part, bits: Bits) -> bool:
        at = part.block * HASH_BYTES
        return state.block_hash(bits) == self.manifest.block_hashes[at : at + HASH_BYTES]

    def _absent(self, piece: Piece) -> Iterator[Piece]:
        """The blocks of a piece that the file does not have, in runs that follow each other."""
        running: list[Part] = []
        for part in piece.parts:
            if self._closed:
                return
            bits = np.empty(part.items, self._kind(part))
            assert self._rows is not None
            self._rows.read(self._at[part.tensor], part.start, bits)
            if not self._good(part, bits):
                running.append(part)
            elif running:
                yield self._piece(running)
                running = []
        if running:
            yield self._piece(running)

    def _piece(self, parts: Sequence[Part]) -> Piece:
        return Piece(tuple(parts), sum(part.items * self._kind(part).itemsize for part in parts))

    def add(self, piece: Piece, data: bytes) -> list[Piece]:
        """Write the blocks of a piece that have the manifest's hashes. data: its bytes. Returns the others, one by one,
        because they need not follow each other. Threads may call it."""
        with self._lock:
            return [piece] if self._closed else self._add(piece, data)

    def _add(self, piece: Piece, data: bytes) -> list[Piece]:
        bad, at = [], 0
        for part in piece.parts:
            kind = self._kind(part)
            end = at + part.items * kind.itemsize
            bits = np.frombuffer(data[at:end], kind)
            at = end
            if self._good(part, bits):
                assert self._rows is not None
                self._rows.write(self._at[part.tensor], part.start, bits)
            else:
                bad.append(self._piece([part]))
        return bad

    def commit(self) -> None:
        """Give the complete file its name, and remove what other fetches of this folder left."""
        assert self._rows is not None
        self._rows.commit(self.path)
        for other in self.path.parent.glob(ARRIVING):
            other.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed = True
        with self._lock:
            if self._rows is not None:
                self._rows.__exit__(kind, error, at)
