"""Features of a package, and the package without one of them.

A feature is a public function or class of a module, or a public method, with a docstring that says what it does and a
body of a few lines. Its definition is removed, and its name in ``__all__`` and in the imports of other files. Other
uses of it fail, which the tests then show. A definition that the package needs when it is imported can be emptied
instead (`hollow`).
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.syntax_trees import parsed
from headrace.tasks.packages.fetch import Package

_DOC = 30
"""Characters of a docstring that says what a feature does."""
_BODY = 3
"""Fewest statements below the docstring; a shorter body follows from the name alone."""
_LARGEST_SKELETON = 5_000
_WIDTH = 100

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Feature(NamedTuple):
    """A definition that can be deleted and asked for again."""

    path: str
    name: str
    """``function``, ``Class`` or ``Class.method``."""
    first: int
    last: int
    """Lines of the definition with its decorators, from 1."""
    skeleton: str
    """Signatures and docstrings."""

    @property
    def short(self) -> str:
        """The last part of the name: what tests call."""
        return self.name.rpartition(".")[2]


def features(package: Package) -> Iterator[Feature]:
    """The features whose names occur in the package's tests, in the order of the text."""
    tests = b"\n".join(package.files[path] for path in package.tests).decode("utf-8", "replace")
    words = set(re.findall(r"\w+", tests))
    for path in package.sources:
        try:
            tree = parsed(package.files[path])
        except (SyntaxError, ValueError):
            continue
        for node, name in _definitions(tree):
            feature = _feature(path, node, name)
            if feature is not None and feature.short in words:
                yield feature


def _definitions(tree: ast.Module) -> Iterator[tuple[_Definition, str]]:
    """Public definitions of a module and methods of its public classes, each with a name that is defined once."""
    for node, name in _once(tree.body):
        yield node, name
        if isinstance(node, ast.ClassDef) and len(node.body) > 2:
            for method, short in _once(node.body):
                if isinstance(method, ast.FunctionDef):
                    yield method, f"{name}.{short}"


def _once(body: list[ast.stmt]) -> Iterator[tuple[_Definition, str]]:
    definitions = [node for node in body if isinstance(node, _Definition)]
    names = [node.name for node in definitions]
    for node in definitions:
        if not node.name.startswith("_") and names.count(node.name) == 1:
            yield node, node.name


def _feature(path: str, node: _Definition, name: str) -> Feature | None:
    document = ast.get_docstring(node) or ""
    code = sum(1 for part in ast.walk(node) if isinstance(part, ast.stmt)) - 2  # itself and its docstring
    if len(document) < _DOC or code < _BODY:
        return None
    skeleton = ast.unparse(_Skeleton().visit(parsed(ast.unparse(node))))
    if len(skeleton) > _LARGEST_SKELETON:
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Feature(path, name, first, node.end_lineno or first, skeleton)


class _Skeleton(ast.NodeTransformer):
    """Bodies of functions become their docstrings; of classes, docstring, fields and public methods stay."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = _document(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.body = _document(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        methods = [part for part in node.body if isinstance(part, _Definition) and _shown(part.name)]
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        node.body = [*_document(node), *fields, *(self.visit(method) for method in methods)]
        return node


def _shown(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def _document(node: _Definition) -> list[ast.stmt]:
    text = ast.get_docstring(node, clean=False)
    return [ast.Expr(ast.Constant(text if text is not None else ...))]


def without(package: Package, feature: Feature) -> dict[str, bytes] | None:
    """The Python files that change when the feature goes, tests among them; None where the rest is no Python any
    more."""
    changed: dict[str, bytes] = {}
    for path, content in package.files.items():
        if not path.endswith(".py"):
            continue
        after = _cut(content, feature.first, feature.last) if path == feature.path else content
        if "." not in feature.name:  # a method is not imported by its name
            after = _unnamed(after, feature.name)
        if after != content:
            try:
                parsed(after)
            except (SyntaxError, ValueError):
                return None
            changed[path] = after
    return changed


def hollow(package: Package, feature: Feature) -> dict[str, bytes] | None:
    """The feature's file with signatures and docstrings alone, whose functions raise NotImplementedError; None where a
    body begins in the line of its ``def``."""
    source = package.files[feature.path]
    lines = source.splitlines(keepends=True)
    functions = [
        node
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and feature.first <= node.lineno <= feature.last
    ]
    outer = [
        node
        for node in functions
        if not any(other.lineno < node.lineno <= (other.end_lineno or 0) for other in functions)
    ]
    for node in sorted(outer, key=lambda node: -node.lineno):
        body, documented = node.body[0], ast.get_docstring(node) is not None
        start = (body.end_lineno or 0) if documented else body.lineno - 1
        if start < node.lineno:
            return None
        raised = f"{' ' * body.col_offset}raise NotImplementedError\n".encode()
        lines[start : node.end_lineno] = [raised]
    after = b"".join(lines)
    try:
        parsed(after)
    except (SyntaxError, ValueError):
        return None
    return {feature.path: after} if outer else None


def _cut(source: bytes, first: int, last: int) -> bytes:
    """Without these lines, the comment right above them, and the blank lines that would stand twice."""
    lines = source.splitlines(keepends=True)
    start, stop = first - 1, last
    while start > 0 and lines[start - 1].lstrip().startswith(b"#"):
        start -= 1
    while stop < len(lines) and not lines[stop].strip():
        stop += 1
    return b"".join(lines[:start] + lines[stop:])


def _unnamed(source: bytes, name: str) -> bytes:
    """Without the name in ``__all__`` and in ``from ... import``."""
    if name.encode() not in source:
        return source
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError):
        return source
    cuts: list[tuple[int, int, bytes]] = []
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            left = [alias for alias in node.names if alias.name != name]
            text = _import(node, left) if left else "pass"
        elif isinstance(node, ast.Assign | ast.AugAssign) and _is_all(node):
            begin, end = _span(starts, node)
            text = re.sub(rf"""(['"]){re.escape(name)}\1\s*,?\s*""", "", source[begin:end].decode("utf-8", "replace"))
        else:
            continue
        cuts.append((*_span(starts, node), text.encode()))
    for begin, end, new in sorted(cuts, reverse=True):
        source = source[:begin] + new + source[end:]
    return source


def _is_all(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _import(node: ast.ImportFrom, names: list[ast.alias]) -> str:
    text = ast.unparse(ast.ImportFrom(node.module, names, node.level))
    if node.col_offset + len(text) <= _WIDTH:
        return text
    indent = " " * node.col_offset
    inner = "".join(f"{indent}    {ast.unparse(alias)},\n" for alias in names)
    return f"from {'.' * node.level}{node.module or ''} import (\n{inner}{indent})"


def _span(starts: list[int], node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def mentions(package: Package, tests: Mapping[str, None], word: str) -> bool:
    """Whether one of the test functions (``path::Class::function``, parameters aside) holds the word, or a statement of
    its class outside of functions, such as ``decorator = staticmethod(package.word)`` for inherited tests."""
    for name in tests:
        path, _, inner = name.partition("[")[0].partition("::")
        owner, _, function = inner.rpartition("::")
        content = package.files.get(path, b"")
        for node in ast.walk(parsed(content)):
            parts: list[ast.stmt] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
                parts = [node]
            elif isinstance(node, ast.ClassDef) and node.name == owner.rpartition("::")[2]:
                parts = [part for part in node.body if not isinstance(part, _Definition)]
            for part in parts:
                text = ast.get_source_segment(content.decode("utf-8", "replace"), part) or ""
                if re.search(rf"\b{re.escape(word)}\b", text):
                    return True
    return False
