"""Nothing unreachable: a function or class that no product code names is deleted or connected."""

import ast
import functools
import re
from pathlib import Path

from tests.support.paths import ROOT

CALLERS = ("headrace", "docs")
"""The product and the scripts of its pages: a kernel that a benchmark times and nothing else calls is deleted or
connected."""
MEASURING = {
    "router_flips": "benchmarks.numerics: the share behind `flipped`, which the product calls",
    "from_array": "benchmarks.numerics: the routes of one message",
    "cached_attention_triton": "benchmarks.kernels: `ragged_attention_triton` for equally many tokens of each sequence",
}
"""Functions beside the product's own that benchmarks measure it with, and what for. This list only gets shorter."""
BY_NAME = re.compile(
    r"(visit|pytest|action|on)_\w+|do_GET|log_message|create_module|writable|initialize|(new|resume|close)_session|__\w+__"
    r"|get_run_id|is_closed|set_closed|next_rendezvous|_should_skip_dynamo"
    r"|connection_made|connection_lost|data_received|eof_received|pause_writing|resume_writing"
)
"""Methods that ast, pytest, textual, http.server, importlib, io, asyncio, acp, torch's elastic agent and torch's modes
call by their names."""
DOTTED, WORD = re.compile(r"[\w.:-]+"), re.compile(r"\w+")


@functools.cache
def parsed(path: Path) -> tuple[frozenset[str], tuple[tuple[int, str], ...]]:
    """The identifiers that a file uses (read, called, reached as an attribute, or spelled in a dotted string), and the
    lines and names of its functions and classes."""
    used: set[str] = set()
    defined: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if DOTTED.fullmatch(node.value):  # the registries name their parts as module:attribute
                used.update(WORD.findall(node.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append((node.lineno, node.name))
    return frozenset(used), tuple(defined)


def unnamed(definitions: list[Path], callers: list[Path]) -> list[str]:
    """Functions and classes in `definitions` whose names no file of `callers` uses."""
    used = frozenset[str]().union(*(parsed(path)[0] for path in callers))
    return [
        f"{path}:{line}: {name}"
        for path in definitions
        for line, name in parsed(path)[1]
        if name not in used and not BY_NAME.fullmatch(name) and name not in MEASURING
    ]


def callers() -> list[Path]:
    return [path for folder in CALLERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_search_finds_a_function_without_a_caller(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('def called(): ...\ndef named(): ...\ndef lonely(): ...\ncalled(), "module:named"\n')
    assert unnamed([path], [path]) == [f"{path}:3: lonely"]


def test_every_function_has_a_caller() -> None:
    assert unnamed(sorted((ROOT / "headrace").rglob("*.py")), callers()) == []


def test_what_is_listed_is_defined_and_only_measured_with() -> None:
    defined = {name for path in callers() for _, name in parsed(path)[1]}
    assert set(MEASURING) <= defined, "shorten MEASURING"
    assert {name for path in callers() for name in parsed(path)[0]} & set(MEASURING) == set(), "shorten MEASURING"
    measured = {name for path in (ROOT / "benchmarks").rglob("*.py") for name in parsed(path)[0]}
    assert set(MEASURING) <= measured, "no benchmark calls it: delete it"
