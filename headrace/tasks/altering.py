"""Alters hidden tests: copies that no code passes, in which an expectation of each test is another one.

Of a test whose statements compare with a literal, the literal changes; of one that compares two computed values, one of
them; any other test gets a comparison that does not hold as its last statement. Names and shape stay the same.
"""

import ast
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.syntax_trees import parsed
from headrace.tasks.sealing import line_starts, literal, sides, span

_Function = ast.FunctionDef | ast.AsyncFunctionDef


_FAILS = re.compile(r"xfail|expectedFailure")
"""Marks of tests that are to fail: their altered copies would pass."""


class _Edit(NamedTuple):
    """Bytes that take the place of those from `begin` to `end`."""

    begin: int
    end: int
    text: bytes


def altered(
    files: Mapping[str, bytes], draw: random.Random, wanted: Mapping[str, Collection[str]] | None = None
) -> dict[str, tuple[bytes, set[str]]]:
    """The files in which tests can be altered: their new content, and the names of the altered functions. wanted: path
    to names of functions; None: all tests, of modules and of patches."""
    copies = {}
    for path, source in sorted(files.items()):
        names = None if wanted is None else wanted.get(path, ())
        if path.endswith(".py") and (names is None or names):
            content, changed = _module(source, names, draw)
        elif path.endswith(".patch"):
            content, changed = _patch(source, draw)
        else:
            continue
        if changed:
            copies[path] = content, changed
    return copies


def _module(source: bytes, wanted: Collection[str] | None, draw: random.Random) -> tuple[bytes, set[str]]:
    """A module with altered test functions, and their names. wanted: names of functions; None: all tests."""
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, set()
    functions = [each for each in _functions(tree.body) if wanted is None or each.name in wanted]
    expected = {each.name for each in functions if _FAILS.search(ast.unparse(each))}
    chosen = [each for each in functions if each.name not in expected]
    starts = line_starts(source)
    edits = [_edit(source, starts, each, draw) for each in chosen]
    compared: set[str] = set()
    if not functions and wanted is None:  # a script
        pairs = [pair for node in tree.body if (pair := sides(node))]
        edits, compared = [_other_side(source, starts, pair, draw) for pair in pairs], {"" for _ in pairs}
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source, {function.name for function in chosen} | compared


def _functions(body: Iterable[ast.stmt]) -> Iterator[_Function]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body)
        elif isinstance(node, _Function) and node.name.startswith("test"):
            yield node


def _edit(source: bytes, starts: list[int], function: _Function, draw: random.Random) -> _Edit:
    """An edit after which the function fails."""
    leaves = any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    compared = [pair for node in function.body if (pair := sides(node))]
    if compared and not leaves:
        return _other_side(source, starts, draw.choice(compared), draw)
    number = draw.randrange(100, 1000)
    lie = b"assert %d == %d" % (number, number + draw.randrange(1, 100))
    first, last = function.body[0], function.body[-1]
    at = starts[first.lineno - 1]
    indent = source[at : at + first.col_offset]
    if indent.strip():  # the body stands on the line of its def
        return _Edit(at + first.col_offset, at + first.col_offset, lie + b"; ")
    if leaves:
        return _Edit(at, at, indent + lie + b"\n")
    assert last.end_lineno is not None
    at = starts[last.end_lineno]
    new_line = b"" if source[:at].endswith((b"\n", b"\r")) else b"\n"
    return _Edit(at, at, new_line + indent + lie + b"\n")


def _other_side(source: bytes, starts: list[int], compared: tuple[ast.expr, ast.expr], draw: random.Random) -> _Edit:
    """An edit after which the two sides of a comparison differ."""
    left, right = compared
    node = left if literal(left) and not literal(right) else right
    begin, end = span(starts, node)
    if literal(node):
        return _Edit(begin, end, repr(_other(ast.literal_eval(node), draw)).encode())
    return _Edit(begin, end, b"(%s, %d)" % (source[begin:end], draw.randrange(100, 1000)))


def _other(value: Any, draw: random.Random) -> Any:
    """Another value of the same type, or of the shape that is nearest."""
    number = draw.randrange(2, 98)
    match value:
        case bool():
            return not value
        case int() | float() | complex():
            return value + number
        case str():
            return value + str(number)
        case bytes():
            return value + str(number).encode()
        case list():
            return [*value, number]
        case tuple():
            return (*value, number)
        case set():
            return value | {number}
        case dict():
            return value | {number: number}
    return number


def _patch(patch: bytes, draw: random.Random) -> tuple[bytes, set[str]]:
    """A patch with other expectations in the lines that it adds to Python files, and the numbers of these lines."""
    lines, changed, python = patch.split(b"\n"), set[str](), False
    for number, line in enumerate(lines):
        if line.startswith(b"+++ "):
            python = line.rstrip().endswith(b".py")
        elif python and line.startswith(b"+"):
            body = line[1:].lstrip()
            try:
                (node,) = parsed(body).body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            if compared := sides(node):
                begin, end, text = _other_side(body, line_starts(body), compared, draw)
                lines[number] = line[: len(line) - len(body)] + body[:begin] + text + body[end:]
                changed.add(str(number))
    return b"\n".join(lines), changed
