"""Learns an adapter on some repositories and measures it on others.

The adapter is a linear map of the query's vector: the identity plus a matrix that is learnt with a softmax over the
chunks of the same workspace. Vectors of chunks stay as they are, so no index is computed again. The number of passes is
the one with the lowest loss on the last quarter of the repositories for learning. The measure is R@5 of the search
actor's own hybrid rank.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.messages.search import AdapterFigures, HeldOut, SearchAdapter, SearchRequest
from headrace.search.adapters.adapter import AdapterError, Floats, packed, unpacked
from headrace.search.chunks import Chunk
from headrace.search.index import Index
from headrace.search.service import Indexes

PASSES, RATE, TEMPERATURE, DECAY = 40, 1e-3, 0.05, 1e-2
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Of AdamW. It is written here because the first step of torch's own imports its compiler, which takes seconds."""
DEEP, SHOWN = 30, 5
"""Chunks of an answer that are read, because several may belong to one function; places among which R@5 looks."""
DRAWS = 5000

Place = tuple[str, str]
"""A path, and the name of a definition or the first line of other text."""


class Query(msgspec.Struct, frozen=True):
    """The text of a search, and the places that were edited after it."""

    text: str
    wanted: frozenset[Place]


class Workspace(msgspec.Struct):
    """One state of a repository: its files, and queries about them."""

    repository: str
    files: dict[str, bytes]
    queries: list[Query]


def place(chunk: Chunk) -> Place:
    """The place of a chunk. All chunks of a long function have the same."""
    return chunk.path, chunk.name or str(chunk.first)


def index_of(workspace: Workspace, indexes: Indexes) -> Index:
    """The workspace's index with all vectors."""
    index = indexes.update(SearchRequest(run="", template="", files=workspace.files, query=""))
    assert index is not None, "an empty workspace is the base"
    while not indexes.ready(index):
        indexes.embed_some()
    index.ready(indexes.vectors)
    return index


class Pairs(msgspec.Struct):
    """The pairs of one workspace: queries [n, width], chunks [m, width], the row of each query's chunk [n]."""

    queries: Floats
    chunks: Floats
    wanted: NDArray[np.int64]

    @classmethod
    def of(cls, workspace: Workspace, indexes: Indexes) -> "Pairs":
        """Each query with each of its places; a place is its first chunk."""
        index = index_of(workspace, indexes)
        rows = [indexes.vectors.get(piece.hash) for piece in index.pieces]
        chunks = [row.astype(np.float32) * np.float32(scale) for row, scale in rows]
        first: dict[Place, int] = {}
        for row, piece in enumerate(index.pieces):
            first.setdefault(place(piece.chunk), row)
        pairs = [
            (row, first[wanted])
            for row, query in enumerate(workspace.queries)
            for wanted in sorted(query.wanted)
            if wanted in first
        ]
        width = indexes.vectors.width
        vectors = indexes.embed([query.text for query in workspace.queries])
        return cls(
            vectors[[row for row, _ in pairs]].reshape(-1, width),
            np.stack(chunks) if chunks else np.zeros((0, width), np.float32),
            np.array([chunk for _, chunk in pairs], dtype=np.int64),
        )

    def loss(self, matrix: Floats) -> tuple[float, Floats]:
        """The cross entropy of the adapted queries over the workspace's chunks, and its gradient [width, width]."""
        moved = self.queries + self.queries @ matrix
        length = np.linalg.norm(moved, axis=1, keepdims=True)
        adapted = moved / length
        scores = adapted @ self.chunks.T / TEMPERATURE
        scores -= scores.max(axis=1, keepdims=True)
        rows, total = np.arange(len(self.wanted)), np.exp(scores).sum(axis=1, keepdims=True)
        loss = float((np.log(total[:, 0]) - scores[rows, self.wanted]).mean())
        shares = np.exp(scores) / total
        shares[rows, self.wanted] -= 1.0
        back = shares @ self.chunks / (TEMPERATURE * len(rows))
        back -= (back * adapted).sum(axis=1, keepdims=True) * adapted
        return loss, self.queries.T @ (back / length)


def learn(learnt: Sequence[Workspace], held_out: Sequence[Workspace], indexes: Indexes) -> SearchAdapter:
    """Learn on the one and measure on the other; none of either is empty. AdapterError for less than two repositories
    with pairs to learn from."""
    names = list(dict.fromkeys(workspace.repository for workspace in learnt))
    checks = set(names[-max(1, len(names) // 4) :])
    train, check = list[Pairs](), list[Pairs]()
    for workspace in learnt:
        pairs = Pairs.of(workspace, indexes)
        if len(pairs.wanted):
            (check if workspace.repository in checks else train).append(pairs)
    if not train or not check:
        raise AdapterError("the pairs are of too few repositories to learn from")
    matrix, losses = _fitted(train, check)
    adapter = SearchAdapter(
        model=indexes.identity,
        matrix=packed(matrix),
        figures=AdapterFigures(
            repositories=len(names),
            pairs=sum(len(pairs.wanted) for pairs in (*train, *check)),
            passes=losses.index(min(losses)),
            losses=tuple(losses),
            held_out=(),
            gain=0.0,
            low=0.0,
            high=0.0,
        ),
    )
    return _measured(adapter, held_out, indexes)


def _fitted(train: Sequence[Pairs], check: Sequence[Pairs]) -> tuple[Floats, list[float]]:
    """The matrix, and the loss on `check` before the first pass and after each."""
    width = train[0].queries.shape[1]
    matrix, mean, square = (np.zeros((width, width), dtype=np.float32) for _ in range(3))
    losses = [float(np.mean([each.loss(matrix)[0] for each in check]))]
    best = matrix.copy()
    for step in range(PASSES * len(train)):
        gradient = train[step % len(train)].loss(matrix)[1]
        mean += (1 - BETAS[0]) * (gradient - mean)
        square += (1 - BETAS[1]) * (gradient * gradient - square)
        spread = np.sqrt(square / (1 - BETAS[1] ** (step + 1))) + EPSILON
        matrix -= RATE * (DECAY * matrix + mean / (1 - BETAS[0] ** (step + 1)) / spread)
        if (step + 1) % len(train) == 0:
            losses.append(float(np.mean([each.loss(matrix)[0] for each in check])))
            if losses[-1] == min(losses):
                best = matrix.copy()
    return best, losses


def _measured(adapter: SearchAdapter, held_out: Sequence[Workspace], indexes: Indexes) -> SearchAdapter:
    """The adapter with its figures. It is measured with the rounded matrix that is published."""
    matrix = unpacked(adapter.matrix)
    plain: dict[str, list[bool]] = {}
    adapted: dict[str, list[bool]] = {}
    for workspace in held_out:
        index = index_of(workspace, indexes)
        vectors = indexes.embed([query.text for query in workspace.queries])
        moved = vectors + vectors @ matrix
        moved /= np.linalg.norm(moved, axis=1, keepdims=True)
        for hits, used in ((plain, vectors), (adapted, moved)):
            hits.setdefault(workspace.repository, []).extend(_hits(index, workspace.queries, used))
    gains = [np.array(adapted[name], dtype=np.float64) - np.array(plain[name]) for name in plain]
    low, high = interval(gains)
    figures = msgspec.structs.replace(
        adapter.figures,
        held_out=tuple(
            HeldOut(
                repository=name,
                queries=len(plain[name]),
                plain=float(np.mean(plain[name])),
                adapted=float(np.mean(adapted[name])),
            )
            for name in plain
        ),
        gain=float(np.mean([each.mean() for each in gains])),
        low=low,
        high=high,
    )
    return msgspec.structs.replace(adapter, figures=figures)


def _hits(index: Index, queries: Sequence[Query], vectors: Floats) -> list[bool]:
    """Per query, whether one of its places is among the first five."""
    hits: list[bool] = []
    for query, vector in zip(queries, vectors, strict=True):
        places = dict.fromkeys(place(piece.chunk) for _, piece in index.hybrid(query.text, vector, DEEP))
        hits.append(not query.wanted.isdisjoint(list(places)[:SHOWN]))
    return hits


def interval(gains: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """95 % of the mean over repositories, drawn with replacement, and of the queries in each. gains: of the queries, an
    array per repository."""
    rng = np.random.default_rng(9)
    chosen = rng.integers(0, len(gains), (DRAWS, len(gains)))
    means = np.zeros(chosen.shape)
    for at, gain in enumerate(gains):
        drawn = chosen == at
        means[drawn] = gain[rng.integers(0, len(gain), (int(drawn.sum()), len(gain)))].mean(axis=1)
    low, high = np.percentile(means.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)
