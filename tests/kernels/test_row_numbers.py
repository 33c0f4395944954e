"""No kernel multiplies the number of a row in 32 bits: rows times their length pass 2^31 in large batches."""

import ast
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

KERNELS = ROOT / "headrace" / "kernels"
PLACES = {"banded"}
"""Functions that multiply numbers of programs, which CUDA itself keeps below 2^31."""


class Value(NamedTuple):
    """Properties of an expression."""

    numbers: bool = False
    """It grows with the number of programs."""
    wide: bool = False
    """It has 64 bits."""
    size: bool = False
    """It is an argument of the launch, or grows with one."""


Found = Value | tuple["Found", ...]


def joined(*parts: Found) -> Value:
    flat = [joined(*part) if not isinstance(part, Value) else part for part in parts]
    return Value(*(any(each[place] for each in flat) for place in range(3)))


class Reader:
    """Follows the values of one function, with the arguments of one call."""

    def __init__(self, functions: dict[str, ast.FunctionDef], wrong: set[str]) -> None:
        self.functions, self.wrong = functions, wrong
        self.known: dict[str, Found] = {}
        self.given: list[Found] = []

    def run(self, function: ast.FunctionDef, arguments: list[Found] | None = None) -> Found:
        """The result of a call; of a launch without arguments, whose numbers are sizes."""
        for place, name in enumerate(function.args.args):
            constant = name.annotation is not None
            given = arguments[place] if arguments is not None and place < len(arguments) else None
            self.known[name.arg] = given if given is not None else Value(size=not constant)
        self.body(function.body)
        return self.given[-1] if self.given else Value()

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self.assign(target, self.read(value))
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    self.known[name] = self.read(ast.copy_location(ast.BinOp(target, op, value), statement))
                case ast.For(target=target, iter=ast.Call(args=bounds), body=inner):
                    begin = joined(*(self.read(bound) for bound in bounds))
                    self.assign(target, begin._replace(size=False))
                    self.body(inner)
                case ast.If(test=test, body=inner, orelse=other):
                    self.read(test)
                    self.body(inner)
                    self.body(other)
                case ast.Return(value=value):
                    self.given.append(Value() if value is None else self.read(value))
                case ast.Expr(value=value) | ast.AnnAssign(value=ast.expr() as value):
                    self.read(value)

    def assign(self, target: ast.expr, value: Found) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = value
        elif isinstance(target, ast.Tuple):
            parts = value if not isinstance(value, Value) else (value,) * len(target.elts)
            for each, part in zip(target.elts, parts, strict=True):
                self.assign(each, part)

    def read(self, node: ast.expr) -> Found:
        match node:
            case ast.Name(id=name):
                return self.known.get(name, Value())
            case ast.Tuple(elts=parts):
                return tuple(self.read(part) for part in parts)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = joined(self.read(left)), joined(self.read(right))
                narrow = isinstance(op, ast.Mult) and not (a.wide or b.wide)
                if narrow and ((a.numbers and b.size) or (b.numbers and a.size)):
                    self.wrong.add(f"line {node.lineno}: {ast.unparse(node)}")
                return joined(a, b)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr="program_id" | "num_programs")):
                return Value(numbers=True)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr="load"), args=parts):
                for part in parts:
                    self.read(part)
                return Value()
            case ast.Call(func=ast.Attribute(value=value, attr="to"), args=[kind, *_]):
                return joined(self.read(value))._replace(wide=ast.unparse(kind) == "tl.int64")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=parts, keywords=options):
                given = [self.read(part) for part in parts]
                for option in options:
                    self.read(option.value)
                inner = self.functions.get(name)
                return joined(*given) if inner is None else Reader(self.functions, self.wrong).run(inner, given)
            case ast.Subscript(value=value):
                return self.read(value)
            case ast.Compare() | ast.Constant():
                return Value()
        return joined(*(self.read(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)))


def jitted(text: str) -> dict[str, ast.FunctionDef]:
    """The functions for a GPU, by name."""
    defined = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {each.name: each for each in defined if any(ast.unparse(mark) == "jit" for mark in each.decorator_list)}


def launched(text: str) -> set[str]:
    """The kernels that a file launches: `name[grid](...)`."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = [call.value for call in calls if isinstance(call, ast.Subscript)]
    return {name.id for name in names if isinstance(name, ast.Name) and name.id in jitted(text)}


def faults(text: str, shared: dict[str, ast.FunctionDef]) -> list[str]:
    """The products of a file's kernels in 32 bits that may be too large."""
    wrong: set[str] = set()
    local = jitted(text)
    for name in launched(text):
        functions = {key: value for key, value in (shared | local).items() if key not in PLACES}
        Reader(functions, wrong).run(local[name])
    return sorted(wrong)


TEXTS = {str(path.relative_to(KERNELS)): path.read_text("utf-8") for path in sorted(KERNELS.rglob("*.py"))}


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if launched(text)])
def test_numbers_of_rows_are_extended_before_they_are_multiplied(name: str) -> None:
    shared = jitted(TEXTS["tile.py"]) | jitted(TEXTS["mxfp8.py"])
    assert faults(TEXTS[name], shared) == []


def test_a_product_in_32_bits_is_found() -> None:
    kernel = """
@jit
def rows(x, row, d):
    return tl.load(x + row * d)

@jit
def kernel(x, y, d, BM: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    value = rows(x, row, d)
    tl.store(y + row.to(tl.int64) * d, value)

kernel[(1,)](x, y, 4, BM=2)
"""
    assert faults(kernel, {}) == ["line 4: row * d"]
    assert faults(kernel.replace("= rows(x, row", "= rows(x, row.to(tl.int64)"), {}) == []
