"""Does an adapter of the query's vector find more? It is learnt on some repositories and measured on others.

    python -m benchmarks.search_adapter [--pairs 120] [--functions 250] [--queries 40]

A repository is an installed package. A pair is the first line of a docstring and the function that it describes,
without its docstring. Such pairs stand for those of a trace, a query and the function that was edited later, because
there are enough of them. Learning and measure are those of `headrace search learn` (headrace/search/adapters).

The interval of the gain is a bootstrap over the repositories held out and, within each, over queries. The adapter is
worth shipping if the interval's low end is above 0 (`ship`).
"""

import argparse
import importlib.metadata
import importlib.util
import random
import sys
import time
from pathlib import Path

import torch

from benchmarks.conditions import Figures, cannot_run, finish
from benchmarks.search import Query as Docstring
from benchmarks.search import without_docstrings
from headrace.search.adapters.learning import Query, Workspace, learn
from headrace.search.models import INSTALL, SearchModelError, find
from headrace.search.service import open_indexes

LEARNT = ("networkx", "pygments", "rich", "pydantic", "hypothesis", "trio", "selenium", "mcp", "mpmath", "textual")
HELD_OUT = ("aiohttp", "anyio", "click", "requests", "urllib3", "fsspec", "jinja2", "packaging", "sympy", "structlog")


def repository(name: str, functions: int, queries: int) -> Workspace | None:
    """Files of a package until they hold so many functions, and queries about some; None where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    paths = [path for path in sorted(root.rglob("*.py")) if not {"tests", "_vendor", "testing"} & set(path.parts)]
    random.Random(name).shuffle(paths)
    files: dict[str, bytes] = {}
    made: list[Docstring] = []
    count = 0
    for path in paths:
        blank = without_docstrings(path.read_text(encoding="utf-8", errors="replace"))
        if blank is None or not blank[1] or count + len(blank[1]) > functions:
            continue
        inside = path.relative_to(root.parent).as_posix()
        files[inside] = blank[0].encode("utf-8", "replace")
        count += len(blank[1])
        names = [function for function, _ in blank[1]]
        made += [
            Docstring(text, inside, function)
            for function, text in blank[1]
            if len(text.split()) >= 4 and names.count(function) == 1
        ]
    texts = [query.text for query in made]
    unique = [query for query in made if texts.count(query.text) == 1]
    random.Random(8).shuffle(unique)
    return Workspace(name, files, [Query(each.text, frozenset([(each.path, each.name)])) for each in unique[:queries]])


def repositories(names: tuple[str, ...], functions: int, queries: int) -> list[Workspace]:
    """Those that are installed and have queries."""
    made = {name: repository(name, functions, queries) for name in names}
    for name, workspace in made.items():
        if workspace is None or not workspace.queries:
            print(f"{name} is not installed; it is left out", file=sys.stderr)
    return [workspace for workspace in made.values() if workspace is not None and workspace.queries]


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
    adapter = learn(
        repositories(LEARNT, args.functions, args.pairs),
        repositories(HELD_OUT, args.functions, args.queries),
        open_indexes(model, 64, None),
    )
    made = adapter.figures
    size = len(made.held_out)
    figures: Figures = {
        "pairs": made.pairs,
        "learnt_repositories": made.repositories,
        "held_out": {
            each.repository: [each.queries, round(100 * each.plain, 1), round(100 * each.adapted, 1)]
            for each in made.held_out
        },
        "queries": sum(each.queries for each in made.held_out),
        "passes": made.passes,
        "check_loss": [round(made.losses[0], 4), round(min(made.losses), 4)],
        "plain_r5_percent": round(100 * sum(each.plain for each in made.held_out) / size, 1),
        "adapter_r5_percent": round(100 * sum(each.adapted for each in made.held_out) / size, 1),
        "gain_points": round(100 * made.gain, 1),
        "gain_low_points": round(100 * made.low, 1),
        "gain_high_points": round(100 * made.high, 1),
        "ship": made.low > 0.0,
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
