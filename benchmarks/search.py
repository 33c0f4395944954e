"""Compares semantic search with BM25: queries are docstrings, answers the described functions of the standard library.

    python -m benchmarks.search [--functions 5400] [--queries 1000] [--tokens 64]

The set is made from the standard library of this Python, so it is the same for everybody with the same version. A query
is the first line of a docstring (at least four words, unique); the wanted function is the one that it describes. All
docstrings are removed before the files are indexed, by the index that the search actor uses. R@5 is the share of
queries whose function is among the first five functions of the answer. The interval is a bootstrap over queries.

Trade-offs of the set: the library may be in the model's training data; one wanted function per query understates every
method by the same functions; queries are docstrings, not questions of an agent.
"""

import argparse
import ast
import random
import sys
import sysconfig
import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.conditions import at_least, at_most, cannot_run, finish
from headrace.messages.search import SearchRequest
from headrace.search.index import Index
from headrace.search.models import INSTALL, SearchModelError, find
from headrace.search.service import Indexes, open_indexes

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "turtledemo", "ensurepip"}
DEEP = 30
"""Chunks of an answer that are read: several may belong to one function."""


class Query(msgspec.Struct, frozen=True):
    """A docstring's first line, and where its function is."""

    text: str
    path: str
    name: str


def without_docstrings(source: str) -> tuple[str, list[tuple[str, str]]] | None:
    """The source without docstrings and its functions as (qualified name, docstring's first line); None when it does
    not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    lines = source.split("\n")
    functions: list[tuple[str, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                document = child.body[0] if ast.get_docstring(child, clean=False) is not None else None
                if not isinstance(child, ast.ClassDef):
                    first = (ast.get_docstring(child) or "").strip().split("\n")[0]
                    functions.append((name, first))
                if document is not None:
                    blank(document, alone=len(child.body) == 1)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{name}.")
            elif isinstance(child, (ast.If, ast.Try)):
                visit(child, prefix)

    def blank(node: ast.stmt, *, alone: bool) -> None:
        assert node.end_lineno is not None
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset or 0 :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [f"{before}{'pass' if alone else ''}{after}"] + [""] * (
            node.end_lineno - node.lineno
        )

    if ast.get_docstring(tree) is not None:
        blank(tree.body[0], alone=False)
    visit(tree, "")
    return "\n".join(line for line in lines if line.strip()), functions


def make_set(functions: int, queries: int) -> tuple[dict[str, bytes], list[Query], int]:
    """Files of the standard library until they hold so many functions, and queries about them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    random.Random(7).shuffle(paths)
    files: dict[str, bytes] = {}
    candidates: list[Query] = []
    count = 0
    for path in paths:
        made = without_docstrings(path.read_text(encoding="utf-8", errors="replace"))
        if made is None or not made[1] or count + len(made[1]) > functions:
            continue
        name = path.relative_to(root).as_posix()
        files[name] = made[0].encode("utf-8", "replace")
        count += len(made[1])
        names = [function for function, _ in made[1]]
        candidates += [
            Query(text, name, function)
            for function, text in made[1]
            if len(text.split()) >= 4 and names.count(function) == 1
        ]
        if count == functions:
            break
    texts = [query.text for query in candidates]
    unique = [query for query in candidates if texts.count(query.text) == 1]
    random.Random(8).shuffle(unique)
    return files, unique[:queries], count


def hits(
    indexes: Indexes, index: Index, queries: list[Query], mode: str
) -> tuple[NDArray[np.bool_], list[tuple[float, float]]]:
    """Per query, whether its function is among the first five; and milliseconds of wall and CPU time per query."""
    out: list[bool] = []
    took: list[tuple[float, float]] = []
    names = {piece.hash: (piece.chunk.path, piece.chunk.name) for piece in index.pieces}
    for query in queries:
        start, cpu = time.perf_counter(), time.process_time()
        reply = indexes.find(index, query.text, DEEP, "hybrid" if mode == "hybrid" else "keyword")
        took.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu)))
        functions = list(dict.fromkeys(names[hit.chunk] for hit in reply.hits))
        out.append((query.path, query.name) in functions[:5])
    return np.array(out), took


def main() -> None:
    """Build the set, index it, and run the queries with both methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=5400)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="auto")
    args = parser.parse_args()
    try:
        model = find(args.model)
    except SearchModelError as error:
        cannot_run(str(error))
    if model is None:
        cannot_run(f"no embedding model: {INSTALL}, or name a folder with --model")
        raise AssertionError
    import torch

    torch.set_num_threads(1)
    files, queries, functions = make_set(args.functions, args.queries)
    print(f"{functions} functions in {len(files)} files, {len(queries)} queries", file=sys.stderr)
    indexes = open_indexes(model, args.tokens, None)
    ask = SearchRequest(run="benchmark", template="", files=files, query=queries[0].text, mode="keyword")
    cpu, wall = time.process_time(), time.perf_counter()
    index = indexes.update(ask)
    assert index is not None
    indexes.find(index, ask.query, 5, "keyword")
    first_cpu, first_wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{len(index.pieces)} chunks; first answer after {first_cpu:.2f} CPU-s", file=sys.stderr)
    cpu = time.process_time()
    while indexes.embed_some():
        done = len(indexes.vectors)
        if done % 640 < 32:
            print(f"{done} vectors, {time.process_time() - cpu:.1f} CPU-s", file=sys.stderr)
    embedding_cpu = time.process_time() - cpu
    path = max(files, key=lambda name: len(files[name]) if len(files[name]) < 20_000 else 0)
    text = files[path].decode().replace("return ", "return  ", 1)
    cpu = time.process_time()
    edited = indexes.update(
        SearchRequest(run="benchmark", template="", base=index.root, files={path: text.encode()}, query="")
    )
    while indexes.embed_some():
        pass
    assert edited is not None
    edited.ready(indexes.vectors)
    again_ms = 1e3 * (time.process_time() - cpu)
    keyword, _ = hits(indexes, index, queries, "keyword")
    hybrid, took = hits(indexes, index, queries, "hybrid")
    gain = hybrid.astype(float) - keyword.astype(float)
    draws = np.random.default_rng(9).integers(0, len(gain), (10_000, len(gain)))
    low, high = np.percentile(100 * gain[draws].mean(axis=1), (2.5, 97.5))
    alone = 100 * hybrid[draws].mean(axis=1)
    figures = {
        "functions": functions,
        "chunks": len(index.pieces),
        "queries": len(queries),
        "tokens": args.tokens,
        "model": indexes.identity,
        "bm25_r5_percent": round(100 * float(keyword.mean()), 1),
        "hybrid_r5_percent": round(100 * float(hybrid.mean()), 1),
        "hybrid_r5_low_percent": round(float(np.percentile(alone, 2.5)), 1),
        "hybrid_r5_high_percent": round(float(np.percentile(alone, 97.5)), 1),
        "gain_points": round(100 * float(gain.mean()), 1),
        "gain_low_points": round(float(low), 1),
        "gain_high_points": round(float(high), 1),
        "first_answer_cpu_s": round(first_cpu, 3),
        "first_answer_wall_s": round(first_wall, 3),
        "embedding_cpu_s": round(embedding_cpu, 1),
        "one_file_again_cpu_ms": round(again_ms, 1),
        "one_file_bytes": len(text),
        "query_p95_ms": round(float(np.percentile([wall for wall, _ in took], 95)), 1),
        "query_p95_cpu_ms": round(float(np.percentile([cpu for _, cpu in took], 95)), 1),
    }
    targets = {
        "hybrid_r5_percent": at_least(figures["hybrid_r5_percent"], 65.0),
        "gain_points": at_least(figures["gain_points"], 12.0),
        "gain_low_points": at_least(figures["gain_low_points"], 8.0),
        "first_answer_cpu_s": at_most(figures["first_answer_cpu_s"], 1.0),
        "embedding_cpu_s": at_most(figures["embedding_cpu_s"], 75.0),
        "one_file_again_cpu_ms": at_most(figures["one_file_again_cpu_ms"], 150.0),
    }
    finish(figures, targets, "torch", "tree-sitter", "tree-sitter-python")


if __name__ == "__main__":
    main()
