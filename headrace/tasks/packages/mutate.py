"""Bugs for real code: small changes of one expression, found on the syntax tree and made in the text.

The kinds are the classic mutation operators (comparison, arithmetic, boundary, logic, return value, argument
order), as in DeMillo, Lipton and Sayward, "Hints on test data selection" (1978), and the tools after it. A change
touches nothing but the bytes of its expression: formatting and comments stay, so a task's solution is a diff of one
place. Only function bodies are changed; annotations, decorators and docstrings are left alone.
"""

import ast
from collections.abc import Iterator

import msgspec

from headrace.syntax_trees import parsed

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
}


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """Replace bytes start..end-1 of a file."""

    path: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """The broken file. ValueError when `source` is not what the mutation was found in."""
        if source[self.start : self.end] != self.before.encode():
            raise ValueError(f"{self.path}: the text at line {self.line} is not {self.before!r}")
        return source[: self.start] + self.after.encode() + source[self.end :]


class _Text:
    """Byte offsets of syntax nodes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, left: ast.expr, right: ast.expr, token: str) -> int | None:
        """Where an operator stands between two operands, None when it can't be told (comments, brackets)."""
        a, b = self.end(left), self.start(right)
        gap = self.source[a:b]
        at = gap.find(token.encode())
        return a + at if at >= 0 and b"#" not in gap and gap.count(token.encode()) == 1 else None


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path, self._text, self._depth = path, _Text(source), 0

    def _add(self, kind: str, node: ast.expr | ast.stmt, start: int, end: int, after: str) -> None:
        before = self._text.source[start:end].decode()
        if before != after:
            self.found.append(
                Mutation(path=self._path, kind=kind, line=node.lineno, start=start, end=end, before=before, after=after)
            )

    def _swap(
        self, kind: str, node: ast.expr, left: ast.expr, right: ast.expr, token: str, others: tuple[str, ...]
    ) -> None:
        at = self._text.between(left, right, token)
        if at is not None:
            for other in others:
                self._add(kind, node, at, at + len(token), other)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        body = node.body
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            body = body[1:]
        for statement in body:
            self.visit(statement)
        self._depth -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Positions inside f-strings can't be trusted before Python 3.12."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if self._depth and len(node.ops) == 1 and (swapped := _COMPARE.get(type(node.ops[0]))):
            self._swap("comparison", node, node.left, node.comparators[0], *swapped)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(n, ast.Constant) and isinstance(n.value, str | bytes) for n in (node.left, node.right))
        alternatives = _ARITHMETIC.get(type(node.op))
        if self._depth and alternatives and not text:
            self._swap("arithmetic", node, node.left, node.right, *alternatives)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if self._depth:
            token, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self._swap("logic", node, node.values[0], node.values[1], token, (other,))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if self._depth and isinstance(node.op, ast.Not | ast.USub):
            kind = "logic" if isinstance(node.op, ast.Not) else "arithmetic"
            self._add(kind, node, self._text.start(node), self._text.start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not self._depth:
            return
        start, end = self._text.start(node), self._text.end(node)
        if isinstance(node.value, bool):
            self._add("constant", node, start, end, str(not node.value))
        elif isinstance(node.value, int) and self._text.source[start:end].isdigit() and node.value < 1 << 31:
            self._add("boundary", node, start, end, str(node.value + 1))
            if node.value:
                self._add("boundary", node, start, end, str(node.value - 1))

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if self._depth and value is not None and not isinstance(value, ast.Constant):
            self._add("return", node, self._text.start(value), self._text.end(value), "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        plain = [argument for argument in node.args if isinstance(argument, ast.Name)]
        if self._depth and len(node.args) == 2 and len(plain) == 2 and plain[0].id != plain[1].id:
            start, end = self._text.start(plain[0]), self._text.end(plain[1])
            middle = self._text.source[self._text.end(plain[0]) : self._text.start(plain[1])].decode()
            self._add("argument", node, start, end, f"{plain[1].id}{middle}{plain[0].id}")
        self.generic_visit(node)


def mutations(path: str, source: bytes) -> Iterator[Mutation]:
    """Every mutation of a module that still compiles, in the order of its text. Empty where the text is not Python."""
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError):
        return
    finder = _Finder(path, source)
    finder.visit(tree)
    for mutation in sorted(finder.found, key=lambda m: (m.start, m.end, m.after)):
        try:
            parsed(mutation.apply(source))
        except (SyntaxError, ValueError):
            continue
        yield mutation
