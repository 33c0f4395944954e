"""Prints the size of the repository in lines of code, by concern: `make size`.

A line of code is neither blank nor part of a comment or of a docstring of a module, class or function.
"""

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONCERNS = {
    "headrace": ("headrace",),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
    "sandboxes": ("headrace/vmhost", "headrace/sandboxes", "headrace/actors/environment"),
    "tasks and judging": ("headrace/tasks", "headrace/judging", "headrace/actors/judge.py"),
    "bus and messages": ("headrace/bus", "headrace/messages"),
    "launch and CLI": ("headrace/launch", "headrace/cli"),
    "weights": (
        "headrace/weights",
        "headrace/engines/server/weights",
        "headrace/actors/weight_sender.py",
        "headrace/actors/weight_receiver.py",
        "headrace/cli/weights.py",
    ),
    "trainer": ("headrace/training", "headrace/actors/trainer"),
}
"""The last six are parts of the first."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines of code of a Python file."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def size(places: tuple[str, ...], root: Path = ROOT) -> int:
    """Lines of code of files and folders; a missing one counts as empty."""
    files = {file for place in places for file in ((root / place).rglob("*.py") if not place.endswith(".py") else ())}
    files |= {root / place for place in places if place.endswith(".py") and (root / place).exists()}
    return sum(code_lines(file) for file in files)


def main(root: Path = ROOT) -> None:
    """Print a line per concern. root: of another checkout, to compare."""
    for concern, places in CONCERNS.items():
        sys.stdout.write(f"{concern:18} {size(places, root):7,}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
