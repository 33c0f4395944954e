"""One state of a workspace as an index: its chunks, their keyword scores, their vectors when all are there.

The order of results follows from root, model, mode and query alone. Ties keep the order of paths and lines.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.search import chunks as cutting
from headrace.search.chunks import Chunk
from headrace.search.embeddings import Vectors
from headrace.search.keywords import Bag, Postings, postings, postings_of, scores
from headrace.search.tree import Folder, changes, tree

KEYWORD_SHARE = 0.3
"""Weight of the keyword score in a hybrid rank; the vectors have the rest of 1."""


class Piece:
    """A chunk, and the values that are computed once from it."""

    __slots__ = ("bag", "chunk", "hash")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.hash, self.bag = chunk, chunk.hash(), Bag(chunk.text)


class Part:
    """The pieces of one file; all states of a workspace with this file share it."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)

    @cached_property
    def postings(self) -> Postings:
        """The words of the pieces."""
        return postings([piece.bag for piece in self.pieces])


class Index:
    """An immutable state of a workspace; `changed` makes the next one, which shares all unchanged parts."""

    def __init__(self, files: Mapping[str, str], parts: Mapping[str, Part], folder: Folder) -> None:
        self.files, self._by_path, self.tree = dict(files), dict(parts), folder
        digest = blake2b(f"{cutting.identity()}\0{folder.hash}".encode(), digest_size=16)
        self.root = digest.hexdigest()
        """Identifies the files and the rules by which they were cut into chunks."""

    @classmethod
    def of(cls, hashes: Mapping[str, str], contents: Mapping[str, bytes]) -> "Index":
        """Of a whole workspace: path to content hash, and contents."""
        return cls({}, {}, tree({})).changed(hashes, contents)

    def changed(self, hashes: Mapping[str, str], contents: Mapping[str, bytes]) -> "Index":
        """The next state: a workspace with exactly these files. contents: of the new and changed files."""
        folder = tree(hashes)
        new, gone = changes(self.tree, folder)
        by_path = {path: part for path, part in self._by_path.items() if path not in gone}
        for path in new:
            by_path[path] = Part([Piece(chunk) for chunk in cutting.cut(path, contents[path])])
        return Index(hashes, by_path, folder)

    @cached_property
    def pieces(self) -> list[Piece]:
        """All chunks, by path and line."""
        return [piece for path in sorted(self._by_path) for piece in self._by_path[path].pieces]

    @cached_property
    def _lengths(self) -> NDArray[np.float64]:
        return np.array([piece.bag.length for piece in self.pieces], dtype=np.float64)

    @cached_property
    def _parts(self) -> list[tuple[int, Postings]]:
        """The postings of each file, with the position of its first piece."""
        parts = [self._by_path[path] for path in sorted(self._by_path)]
        firsts = itertools.accumulate((len(part.pieces) for part in parts), initial=0)
        return [(first, part.postings) for first, part in zip(firsts, parts, strict=False)]

    def missing(self, vectors: Vectors) -> list[Piece]:
        """The chunks without a vector, each hash once."""
        return list({piece.hash: piece for piece in self.pieces if piece.hash not in vectors}.values())

    def ready(self, vectors: Vectors) -> None:
        """Gather the vectors of all chunks for `hybrid`. KeyError when one is missing."""
        if self._matrix is None:
            rows = [vectors.get(piece.hash) for piece in self.pieces]
            matrix = np.zeros((len(rows), vectors.width), dtype=np.float32)
            for at, (row, scale) in enumerate(rows):
                np.multiply(row, np.float32(scale), out=matrix[at], casting="unsafe")
            self._matrix = matrix

    _matrix: NDArray[np.float32] | None = None

    def keyword(self, query: str, limit: int) -> list[tuple[float, Piece]]:
        """The chunks that share a word with the query, best first."""
        parts = [(0, postings_of(query, [piece.bag for piece in self.pieces]))]
        scored = scores(query, parts, self._lengths)
        return [pair for pair in self._best(scored, limit) if pair[0] > 0]

    def hybrid(self, query: str, vector: NDArray[np.float32], limit: int) -> list[tuple[float, Piece]]:
        """Chunks by keyword score and similarity to the query's vector, each in standard deviations of its own."""
        assert self._matrix is not None
        words = scores(query, self._parts, self._lengths)
        near = (self._matrix * vector).sum(axis=1, dtype=np.float64)
        total = KEYWORD_SHARE * _standard(words) + (1 - KEYWORD_SHARE) * _standard(near)
        return self._best(total, limit)

    def _best(self, values: NDArray[np.float64], limit: int) -> list[tuple[float, Piece]]:
        order = np.argsort(-np.round(values, 6), kind="stable")[:limit]
        return [(round(float(values[at]), 6), self.pieces[at]) for at in order]


def _standard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    spread = float(values.std()) if len(values) else 0.0
    return (values - values.mean()) / spread if spread > 1e-12 else np.zeros_like(values)
