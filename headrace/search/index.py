"""One state of a workspace as an index: its chunks, their keyword scores, their vectors when all are there.

The order of results follows from root, model, mode and query alone. Ties keep the order of paths and lines.
"""

import itertools
from collections.abc import Mapping, MutableMapping
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.search import chunks as cutting
from headrace.search.chunks import MOST_WORK, Chunk, Work, WorkExceeded
from headrace.search.embeddings import Vectors
from headrace.search.keywords import Bag, Postings, postings, postings_of, scores
from headrace.search.tree import Folder, changes, tree

KEYWORD_SHARE = 0.3
"""Weight of the keyword score in a hybrid rank; the vectors have the rest of 1."""


class Piece:
    """A chunk, and the values that are computed once from it."""

    __slots__ = ("bag", "chunk", "hash", "size")

    def __init__(self, chunk: Chunk, work: Work) -> None:
        text = chunk.text
        work.spend(len(text) // 32)
        self.chunk, self.hash, self.bag, self.size = chunk, chunk.hash(), Bag(text), len(text)
        work.spend(3 * len(self.bag) + self.bag.length // 4)


class IndexPart:
    """The pieces of one file; all states of all workspaces with this file share it."""

    def __init__(self, path: str, data: bytes, left: int = MOST_WORK) -> None:
        """WorkExceeded when the file costs more than `left`."""
        work = Work(left)
        self.pieces = tuple(Piece(chunk, work) for chunk in cutting.cut(path, data, work))
        self.work = left - work.left
        """Work that it cost."""

    @cached_property
    def postings(self) -> Postings:
        """The words of the pieces."""
        return postings([piece.bag for piece in self.pieces])


Parts = MutableMapping[tuple[str, str], IndexPart]
"""The parts of several indexes by path and content hash."""


class Index:
    """An immutable state of a workspace; `changed` makes the next one, which shares all unchanged parts.

    Files are indexed in the order of their paths, as long as they cost at most `MOST_WORK` together. The files from the
    first one that exceeds it are left out. So the files alone decide, on every machine and whichever state came before.
    """

    def __init__(self, files: Mapping[str, str], parts: Mapping[str, IndexPart], folder: Folder) -> None:
        self.files, self._by_path, self.tree = dict(files), dict(parts), folder
        self.left_out = len(self.files) - len(self._by_path)
        """Files that are not indexed, because all of them cost too much work."""
        limit = f"\0work-1 {MOST_WORK}" if self.left_out else ""
        digest = blake2b(f"{cutting.identity()}\0{folder.hash}{limit}".encode(), digest_size=16)
        self.root = digest.hexdigest()
        """Identifies the files, the rules by which they were cut into chunks, and the limit where it left out files."""

    @classmethod
    def of(cls, hashes: Mapping[str, str], contents: Mapping[str, bytes], shared: Parts | None = None) -> "Index":
        """Of a whole workspace: path to content hash, and contents."""
        index = cls({}, {}, tree({})).changed(hashes, contents, shared)
        assert index is not None, "every file has its contents"
        return index

    def changed(
        self, hashes: Mapping[str, str], contents: Mapping[str, bytes], shared: Parts | None = None
    ) -> "Index | None":
        """The next state: a workspace with exactly these files. None when a file that was left out is to be indexed now
        and has no contents here. contents: of the new and changed files. shared: parts of other indexes; new ones are
        added."""
        folder = tree(hashes)
        new = set(changes(self.tree, folder)[0])
        shared = {} if shared is None else shared
        by_path: dict[str, IndexPart] = {}
        left = MOST_WORK
        for path in sorted(hashes):
            key = path, hashes[path]
            part = (self._by_path.get(path) if path not in new else None) or shared.get(key)
            if part is None:
                if path not in contents:
                    return None
                try:
                    part = shared[key] = IndexPart(path, contents[path], left)
                except WorkExceeded:
                    break
            left -= part.work
            if left < 0:
                break
            by_path[path] = part
        return Index(hashes, by_path, folder)

    @property
    def parts(self) -> list[IndexPart]:
        """The parts of all indexed files."""
        return list(self._by_path.values())

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
