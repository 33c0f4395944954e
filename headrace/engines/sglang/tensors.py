"""Gives a version to a server as tensors in shared memory, in buckets, instead of as a file.

Idea: /update_weights_from_tensor takes pickled names and tensors. torch pickles a tensor in shared memory as the name
of the segment, so a request has a few kB and the server maps the bits. This module writes such segments and pickles
itself: with torch's own functions this process would start torch's helper process and change torch's sharing strategy
for everything else in it. The server's unpickler admits the few functions that are named here.

A segment begins with torch's reference count, which every map of the server lowers by one. It starts so high that the
server never deletes a segment; this module does, after each update. Names are new for every segment, because the server
caches segments by name.

The server copies all tensors of a request to its device before it loads them, so buckets bound the memory that it needs
besides its weights. The next bucket is written while the server loads one; the first is written before the pause.

Trade-off: only a server on this machine, with the same /dev/shm, can map a segment, and a segment that it cannot map
ends its scheduler. So `transport` decides before anything is sent.
"""

import base64
import hashlib
import os
import pickle
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

SEGMENTS = Path("/dev/shm")
"""The folder of POSIX shared memory."""
HEADER = 64
"""Bytes before a segment's content: torch's alignment of a shared map, which begins with the reference count."""
REFERENCES = 1 << 20
ALIGN = 64
BUCKET = 256 << 20
"""Most bytes of a bucket, unless a single tensor has more."""


def buckets(tensors: Mapping[str, Tensor], most: int | None = None) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of at most `most` bytes (`BUCKET`); a larger tensor is a group of its own."""
    limit = BUCKET if most is None else most
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def prefix(folder: Path) -> str:
    """The start of the names of the segments of the engine that stages in `folder`."""
    return f"headrace-{hashlib.blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()}-"


def discard_abandoned(start: str) -> None:
    """Delete the segments of an engine with this prefix that was killed before it could."""
    for segment in SEGMENTS.glob(f"{start}*"):
        segment.unlink(missing_ok=True)


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


class Segment:
    """Tensors in one segment of shared memory. `remove` frees it."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Write the tensors. Blocks. prefix: the start of the segment's name. OSError when there is no memory."""
        self._shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self._offsets: list[int] = []
        self.content = 0
        """Bytes of the tensors."""
        at = 0
        for tensor in tensors.values():
            self._offsets.append(at)
            at += -(-tensor.nbytes // ALIGN) * ALIGN
            self.content += tensor.nbytes
        self._size = max(at, ALIGN)
        self.path = SEGMENTS / f"{prefix}{uuid.uuid4().hex}"
        with open(self.path, "xb", buffering=0) as file:
            os.fchmod(file.fileno(), 0o600)
            try:
                os.posix_fallocate(file.fileno(), 0, HEADER + self._size)
                os.pwrite(file.fileno(), struct.pack("<i", REFERENCES), 0)
                for tensor, offset in zip(tensors.values(), self._offsets, strict=True):
                    _put(file.fileno(), tensor, HEADER + offset)
            except BaseException:
                self.remove()
                raise

    def payload(self) -> str:
        """The pickled pairs of name and tensor, as base64, for one rank."""
        handle = f"/{self.path.name}".encode()
        storage = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", handle, self._size)
        pairs = []
        for (name, dtype, shape), offset in zip(self._shapes, self._offsets, strict=True):
            typed = _Call(reductions.rebuild_typed_storage, storage, dtype)
            layout = (offset // dtype.itemsize, shape, _strides(shape), False)
            pairs.append((name, _Call(reductions.rebuild_tensor, Tensor, typed, layout)))
        return base64.b64encode(pickle.dumps(pairs, protocol=4)).decode()

    def remove(self) -> None:
        """Delete the segment's name; the server keeps what it has mapped."""
        self.path.unlink(missing_ok=True)


def body(segment: Segment, ranks: int, label: str) -> dict[str, Any]:
    """The JSON of POST /update_weights_from_tensor. label: the version that the server reports from then on."""
    return {
        "serialized_named_tensors": [segment.payload()] * ranks,
        "flush_cache": False,
        "weight_version": label,
    }


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _put(descriptor: int, tensor: Tensor, at: int) -> None:
    """Write a tensor's bits. pwrite and no mapping: page faults on new memory take twice the time."""
    view = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    while len(view):
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done
