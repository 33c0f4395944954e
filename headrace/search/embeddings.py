"""The vectors of chunks by chunk hash: in memory, and in one file per template on this node.

Vectors are int8 with one scale each. A file holds the chunks that were first seen in workspaces of one template; it is
read when such a workspace is indexed, so only the first one pays for the embedding. The folder's name carries the
identity of the model, so vectors of two models never meet.
"""

import math
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MOST_FILES = 512
"""Template files that are kept; the least recently used ones are removed."""
_HASH = 16


class Vectors:
    """The store of one model."""

    def __init__(self, folder: Path | None, width: int) -> None:
        """folder: for the templates' files; None keeps vectors in memory alone."""
        self.width = width
        self._folder = folder
        self._rows: dict[str, tuple[NDArray[np.int8], float]] = {}
        self._read: set[str] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, chunk: str) -> bool:
        return chunk in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, chunk: str) -> tuple[NDArray[np.int8], float]:
        """Vector and scale. KeyError."""
        return self._rows[chunk]

    def put(self, template: str, chunks: list[str], vectors: NDArray[np.float32]) -> None:
        """Store new vectors in memory and in the template's file."""
        packed = bytearray()
        for chunk, vector in zip(chunks, vectors, strict=True):
            scale = float(np.float32(max(float(np.abs(vector).max()), 1e-12) / 127.0))
            row = np.rint(vector / scale).astype(np.int8)
            self._rows[chunk] = row, scale
            packed += bytes.fromhex(chunk) + struct.pack("<f", scale) + row.tobytes()
        path = self._path(template)
        if path is not None:
            with path.open("ab") as file:  # one write: two processes never interleave their records
                file.write(bytes(packed))

    def load(self, template: str) -> None:
        """Read the template's file, once."""
        path = self._path(template)
        if path is None or template in self._read:
            return
        self._read.add(template)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            self._prune()
            return
        size = _HASH + 4 + self.width
        for at in range(0, len(data) - size + 1, size):  # a torn last record is left out, and written again later
            (scale,) = struct.unpack_from("<f", data, at + _HASH)
            if not 0.0 < scale < math.inf:  # damaged on disk; its chunk is embedded again
                continue
            row = np.frombuffer(data, dtype=np.int8, count=self.width, offset=at + _HASH + 4)
            self._rows.setdefault(data[at : at + _HASH].hex(), (row, scale))
        if len(data) % size:
            with path.open("r+b") as file:
                file.truncate(len(data) - len(data) % size)

    def _path(self, template: str) -> Path | None:
        return self._folder / f"{template}.vectors" if self._folder is not None and template else None

    def _prune(self) -> None:
        assert self._folder is not None
        files = sorted(self._folder.glob("*.vectors"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) + 1 - MOST_FILES)]:
            path.unlink(missing_ok=True)
