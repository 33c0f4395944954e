"""Does an adapter of the query's vector find more? It is learnt on some repositories and measured on others.

    python -m benchmarks.search_adapter [--pairs 120] [--functions 250] [--queries 40]

A repository is an installed package. A pair is the first line of a docstring and the function that it describes,
without its docstring. Such pairs stand for those of a trace, a query and the function that was edited later, because
there are enough of them. The adapter is a linear map of the query's vector: the identity plus a matrix that is learnt
with a softmax over the functions of the same repository. Vectors of chunks stay as they are, so no index is computed
again. The number of passes is the one with the lowest loss on the last quarter of the repositories for training.

The benchmark measures R@5 of the search actor's own hybrid rank on the repositories held out, with and without the
adapter. The interval is a bootstrap over repositories and, within each, over queries. The adapter is worth shipping if
the interval's low end is above 0 (`ship`).
"""

import argparse
import importlib.metadata
import importlib.util
import random
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.conditions import Figures, cannot_run, finish
from benchmarks.search import DEEP, Query, without_docstrings
from headrace.messages.search import SearchRequest
from headrace.search.encoder import Encoder
from headrace.search.index import Index
from headrace.search.models import INSTALL, SearchModelError, find
from headrace.search.service import Indexes, open_indexes

LEARNT = ("networkx", "pygments", "rich", "pydantic", "hypothesis", "trio", "selenium", "mcp", "mpmath", "textual")
HELD_OUT = ("aiohttp", "anyio", "click", "requests", "urllib3", "fsspec", "jinja2", "packaging", "sympy", "structlog")
PASSES, RATE, TEMPERATURE, DECAY = 40, 1e-3, 0.05, 1e-2

Floats = NDArray[np.float32]


class Repository(msgspec.Struct):
    """A package: files without docstrings, and queries about some of its functions."""

    name: str
    files: dict[str, bytes]
    queries: list[Query]


def repository(name: str, functions: int, queries: int) -> Repository | None:
    """Files of a package until they hold so many functions; None where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    paths = [path for path in sorted(root.rglob("*.py")) if not {"tests", "_vendor", "testing"} & set(path.parts)]
    random.Random(name).shuffle(paths)
    made = Repository(name, {}, [])
    count = 0
    for path in paths:
        blank = without_docstrings(path.read_text(encoding="utf-8", errors="replace"))
        if blank is None or not blank[1] or count + len(blank[1]) > functions:
            continue
        inside = path.relative_to(root.parent).as_posix()
        made.files[inside] = blank[0].encode("utf-8", "replace")
        count += len(blank[1])
        names = [function for function, _ in blank[1]]
        made.queries += [
            Query(text, inside, function)
            for function, text in blank[1]
            if len(text.split()) >= 4 and names.count(function) == 1
        ]
    texts = [query.text for query in made.queries]
    unique = [query for query in made.queries if texts.count(query.text) == 1]
    random.Random(8).shuffle(unique)
    made.queries = unique[:queries]
    return made


def indexed(indexes: Indexes, made: Repository) -> Index:
    """The repository's index with all vectors."""
    index = indexes.update(SearchRequest(run="benchmark", template="", files=made.files, query=""))
    assert index is not None
    while not indexes.ready(index):
        indexes.embed_some()
    index.ready(indexes.vectors)
    return index


class Pairs(msgspec.Struct):
    """The pairs of one repository: queries [n, width], chunks [m, width], the row of each query's chunk."""

    queries: torch.Tensor
    chunks: torch.Tensor
    wanted: torch.Tensor

    def loss(self, matrix: torch.Tensor) -> torch.Tensor:
        """Of the adapted queries over the repository's chunks."""
        adapted = torch.nn.functional.normalize(self.queries + self.queries @ matrix, dim=1)
        return torch.nn.functional.cross_entropy(adapted @ self.chunks.T / TEMPERATURE, self.wanted)


def pairs_of(index: Index, indexes: Indexes, queries: list[Query], vectors: Floats) -> Pairs:
    """The pairs of a repository whose function is one chunk's."""
    rows = [indexes.vectors.get(piece.hash) for piece in index.pieces]
    chunks = np.stack([row.astype(np.float32) * np.float32(scale) for row, scale in rows])
    at: dict[tuple[str, str], int] = {}
    for row, piece in enumerate(index.pieces):
        at.setdefault((piece.chunk.path, piece.chunk.name), row)
    pairs = [(row, at[query.path, query.name]) for row, query in enumerate(queries) if (query.path, query.name) in at]
    return Pairs(
        torch.from_numpy(vectors[[row for row, _ in pairs]]),
        torch.from_numpy(chunks),
        torch.tensor([chunk for _, chunk in pairs]),
    )


def learnt(train: list[Pairs], check: list[Pairs]) -> tuple[Floats, int, list[float]]:
    """The matrix, the number of passes, and the loss on `check` after each of them; the first is without adapter."""
    torch.manual_seed(1)
    width = train[0].queries.shape[1]
    matrix = torch.zeros(width, width, requires_grad=True)
    optimizer = torch.optim.AdamW([matrix], lr=RATE, weight_decay=DECAY)

    def checked() -> float:
        with torch.no_grad():
            return float(torch.stack([each.loss(matrix) for each in check]).mean())

    losses, best = [checked()], matrix.detach().clone()
    for _ in range(PASSES):
        for each in train:
            optimizer.zero_grad()
            each.loss(matrix).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        losses.append(checked())
        if losses[-1] == min(losses):
            best = matrix.detach().clone()
    return best.numpy(), losses.index(min(losses)), losses


def hits(index: Index, queries: list[Query], vectors: Floats) -> NDArray[np.float64]:
    """Per query, 1 where its function is among the first five."""
    out: list[bool] = []
    for query, vector in zip(queries, vectors, strict=True):
        places = [(piece.chunk.path, piece.chunk.name) for _, piece in index.hybrid(query.text, vector, DEEP)]
        out.append((query.path, query.name) in list(dict.fromkeys(places))[:5])
    return np.array(out, dtype=np.float64)


def interval(gains: list[NDArray[np.float64]], draws: int = 5000) -> tuple[float, float]:
    """95 % of the mean over repositories, drawn with replacement, and of the queries in each."""
    rng = np.random.default_rng(9)
    means = []
    for _ in range(draws):
        chosen = rng.integers(0, len(gains), len(gains))
        means.append(np.mean([gains[at][rng.integers(0, len(gains[at]), len(gains[at]))].mean() for at in chosen]))
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    """Index all repositories, learn on some, measure on the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120, help="pairs of a repository that is learnt from")
    parser.add_argument("--functions", type=int, default=250, help="functions of a repository held out")
    parser.add_argument("--queries", type=int, default=40, help="queries of a repository held out")
    args = parser.parse_args()
    try:
        model = find("auto")
    except SearchModelError as error:
        cannot_run(str(error))
    if model is None:
        cannot_run(f"no embedding model: {INSTALL}")
        raise AssertionError
    torch.set_num_threads(1)
    begin = time.process_time()
    indexes, encoder = open_indexes(model, 64, None), Encoder(model.folder, 64)
    pairs: list[Pairs] = []
    for name in LEARNT:
        made = repository(name, args.functions, args.pairs)
        if made is None or not made.queries:
            print(f"{name} is not installed; it is left out", file=sys.stderr)
            continue
        index = indexed(indexes, made)
        pairs.append(pairs_of(index, indexes, made.queries, encoder.embed([query.text for query in made.queries])))
        print(f"{name}: {len(pairs[-1].wanted)} pairs, {time.process_time() - begin:.0f} CPU-s", file=sys.stderr)
    split = len(pairs) - max(1, len(pairs) // 4)
    matrix, passes, losses = learnt(pairs[:split], pairs[split:])
    figures: Figures = {"pairs": sum(len(each.wanted) for each in pairs), "learnt_repositories": len(pairs)}
    plain: list[NDArray[np.float64]] = []
    adapted: list[NDArray[np.float64]] = []
    by_name: dict[str, list[float]] = {}
    for name in HELD_OUT:
        made = repository(name, args.functions, args.queries)
        if made is None or not made.queries:
            print(f"{name} is not installed; it is left out", file=sys.stderr)
            continue
        index = indexed(indexes, made)
        vectors = encoder.embed([query.text for query in made.queries])
        moved = vectors + vectors @ matrix
        moved /= np.linalg.norm(moved, axis=1, keepdims=True)
        plain.append(hits(index, made.queries, vectors))
        adapted.append(hits(index, made.queries, moved))
        by_name[name] = [len(made.queries), *(round(100 * float(side[-1].mean()), 1) for side in (plain, adapted))]
        print(f"{name}: {by_name[name]}, {time.process_time() - begin:.0f} CPU-s", file=sys.stderr)
    gains = [after - before for before, after in zip(plain, adapted, strict=True)]
    low, high = interval(gains)
    figures |= {
        "held_out": by_name,
        "queries": sum(map(len, gains)),
        "passes": passes,
        "check_loss": [round(losses[0], 4), round(min(losses), 4)],
        "plain_r5_percent": round(100 * float(np.mean([each.mean() for each in plain])), 1),
        "adapter_r5_percent": round(100 * float(np.mean([each.mean() for each in adapted])), 1),
        "gain_points": round(100 * float(np.mean([each.mean() for each in gains])), 1),
        "gain_low_points": round(100 * low, 1),
        "gain_high_points": round(100 * high, 1),
        "ship": low > 0.0,
        "cpu_s": round(time.process_time() - begin, 1),
        "packages": {name: _version(name) for name in (*LEARNT, *HELD_OUT)},
    }
    finish(figures, {}, "torch", "tree-sitter", "tree-sitter-python")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
