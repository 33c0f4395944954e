"""Snapshot files: the published weights of one version as one safetensors file, which readers map into memory.

The idea: a version is written once and gets its final name only when it is complete (temporary name, fsync, rename);
after that it never changes. Trainer and sender, receiver and engine map the same file, so on one node no weights are
copied through the bus.

Layout: plain safetensors, so any other tool reads it. Tensors are ordered by falling item size, then by name, which
keeps every tensor aligned. The metadata has the state hash as ``state_hash`` for people to read; no code trusts it.
"""

import itertools
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.messages.weights import TensorInfo
from headrace.weights import state
from headrace.weights.state import Bits, WeightError

_MAX_HEADER = 100 << 20
_serial = itertools.count()
THREADS, ALONE = 16, 64 << 20
"""The most threads that read or write a version, and the bytes up to which one hashes a file."""


def threads() -> int:
    """The threads of this machine that read or write a version."""
    return min(THREADS, len(os.sched_getaffinity(0)))


def _header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's header with its length word, and each tensor's offset from the start of the file, in bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    for info in sorted(tensors, key=lambda info: (-state.itemsize(info.dtype), info.name)):
        end = at + state.nbytes(info)
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end]}
        offsets[info.name] = at
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: offset + len(head) for name, offset in offsets.items()}


class Rows:
    """A file of preallocated tensors that several processes write, each its own rows. A `Draft` in one process creates
    it."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> None:
        """Open the temporary file of a draft with the same tensors and metadata."""
        _, offsets = _header(tensors, metadata)
        self._name = path.name
        self._at = [offsets[info.name] for info in tensors]
        self._file = open(path, "rb+", buffering=0)  # closed by _discard

    def fileno(self) -> int:
        """The descriptor of the open file, for fsync."""
        return self._file.fileno()

    def _put(self, data: bytes | memoryview, at: int) -> None:
        while len(data):
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def write(self, tensor: int, start: int, part: Bits) -> None:
        """Write bits of the tensor with index `tensor` at item `start` of its flat view."""
        if part.size:
            self._put(part.view(np.uint8).data, self._at[tensor] + start * part.itemsize)

    def read(self, tensor: int, start: int, into: Bits) -> None:
        """Read written bits of tensor `tensor` from item `start` into an array. WeightError when the file is too
        short."""
        view, at = into.view(np.uint8).data, self._at[tensor] + start * into.itemsize
        while len(view):
            done = os.preadv(self._file.fileno(), [view], at)
            if not done:
                raise WeightError(f"{self._name} ends before tensor {tensor}, item {start}: it was truncated meanwhile")
            view, at = view[done:], at + done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._discard()

    def close(self) -> None:
        """Close the file."""
        self._discard()

    def _discard(self) -> None:
        self._file.close()


class Draft(Rows):
    """A snapshot file that is being written: tensors go into a temporary file, and `commit` gives it its name.

    Without `commit` (after an error or a cancellation) the temporary file is removed, so an incomplete version never
    has a name. It uses pwrite and no mapping: page faults on a new file take twice the time (measured).
    """

    def __init__(self, path: str | Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None):
        """Reserve disk space for `tensors` in the folder of `path`. OSError when the disk is full."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{next(_serial)}.part")
        head, offsets = _header(tensors, metadata or {})
        self._name, self._tensors = self.temporary.name, tensors
        self._at = [offsets[info.name] for info in tensors]
        size = len(head) + sum(state.nbytes(info) for info in tensors)
        self._file = open(self.temporary, "wb+", buffering=0)  # closed by _discard
        try:
            # Reserve the blocks now, so that a full disk is an error here and not in the middle of the file.
            os.posix_fallocate(self._file.fileno(), 0, size)
            self._put(head, 0)
        except OSError:
            self._discard()
            raise

    def describe(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata, for values that are known only when the tensors are written. ValueError when they need
        another number of bytes."""
        head, offsets = _header(self._tensors, metadata)
        if [offsets[info.name] for info in self._tensors] != self._at:
            raise ValueError(f"{self._name}: expected metadata of as many bytes as before")
        self._put(head, 0)

    def commit(self, path: Path | None = None, *, durable: bool = True) -> None:
        """Give the file its name; durable: it survives a loss of power. path: another name in the same folder, for one
        that is known only when the tensors are written."""
        self.path = path or self.path
        if durable:
            os.fsync(self._file.fileno())
        os.replace(self.temporary, self.path)
        if not durable:
            return
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)


class Snapshot:
    """A mapped snapshot file. Views of its bits keep the mapping alive after the file is deleted."""

    def __init__(self, path: str | Path):
        """Map a file. WeightError when it is not a whole safetensors file; OSError when it cannot be opened."""
        self.path = Path(path)
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 8:
                raise WeightError(f"{self.path} is not a safetensors file: shorter than its length word")
            # Copy-on-write: torch needs writable memory; the file does not change.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.tensors, self._offsets, self.metadata = _parse(self._map, self.path)

    def array(self, info: TensorInfo) -> Bits:
        """The flat bit view (u1, u2 or u4) of one tensor."""
        kind = state.unsigned(info.dtype)
        count = state.nbytes(info) // kind.itemsize
        if not count:
            return np.empty(0, kind)
        at = self._offsets[info.name]
        raw = np.frombuffer(self._map, np.uint8, count * kind.itemsize, at)
        return (raw if at % kind.itemsize == 0 else raw.copy()).view(kind)

    def arrays(self) -> list[Bits]:
        """Flat bit views in name order."""
        return [self.array(info) for info in self.tensors]

    def hashes(self) -> bytes:
        """The block hashes of the file's present bits, 16 bytes each."""
        parts = (
            array[start : start + count]
            for info, array in zip(self.tensors, self.arrays(), strict=True)
            for start, count in state.blocks(info)
        )
        with ThreadPoolExecutor(threads() if len(self._map) > ALONE else 1) as pool:
            return b"".join(pool.map(state.block_hash, parts))

    def state_hash(self) -> str:
        """The state hash of the file's present bits."""
        return state.root(self.tensors, self.hashes())


def discard_abandoned(folder: Path) -> None:
    """Delete the temporary files of drafts whose process has ended without a chance to do so. All writers of the folder
    must be on this machine."""
    for file in folder.glob(".*.part"):
        pid = file.name.split(".")[-3]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)


def _parse(data: mmap.mmap, path: Path) -> tuple[tuple[TensorInfo, ...], dict[str, int], dict[str, str]]:
    """The tensors in name order, the offset of each from the start of the file in bytes, and the metadata."""
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER, len(data) - 8):
        raise WeightError(
            f"{path} is not a safetensors file: it states a header of {length} bytes, more than can be there"
        )
    try:
        entries: dict[str, Any] = json.loads(data[8 : 8 + length])
        metadata = dict(entries.pop("__metadata__", {}))
        tensors, offsets = [], {}
        for name in sorted(entries):
            entry = entries[name]
            info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]))
            start, end = entry["data_offsets"]
            if end - start != state.nbytes(info) or start < 0 or 8 + length + end > len(data):
                raise WeightError(f"{path}: tensor {name!r} is not completely inside the file")
            tensors.append(info)
            offsets[name] = 8 + length + start
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path} is not a safetensors file: {error}") from None
    return tuple(tensors), offsets, metadata


def file_hash(path: str | Path) -> str:
    """The state hash of a file, computed from its bits. WeightError as `Snapshot`."""
    return Snapshot(path).state_hash()
