"""Seals hidden tests: the literals with which they compare stay on the host.

``assert area(2, 3) == 6`` becomes ``__observe__(0, (area(2, 3)))``, and 6 goes into the oracle's answers
(`guest/testing/observing.py` has the other half). A candidate that patches the runner, forges its report or reads the
tests finds calls without results; to be counted as passed it must report the right values in the right order.

Sealed are ``assert`` and ``assertEqual`` of a value with a literal, in either order. Of two computed values both are
reported; the value that the right code computes is recorded when the task is made, and serves as the literal. Where
that value differs between processes, the two reported values are compared with each other, and a candidate that forges
its report can invent both. Everything else (`raises`, truth alone) stays an assertion inside the process, which the
candidate can forge. Line numbers stay the same, so failures name the right lines.

Trade-off: a right repair that computes another pair of equal values than the recorded one fails.
"""

import ast
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from headrace.messages.sandbox import TestOutcome
from headrace.syntax_trees import parsed
from headrace.tasks.observations import decode
from headrace.vmhost.guest.testing.observing import LIMIT

Answers = dict[str, tuple[tuple[int, str], ...]]
"""Test id to what it observes, in order: the number of the comparison, and the source of the value that it must see, a
literal or a recorded one; empty where it observes two that must be equal."""
LARGEST = 1 << 16
"""The most characters of a recorded value."""
ALLOWANCE = LIMIT * 3 // 4
"""Characters that all comparisons of a run may see: a run of a candidate may see more than the right one did."""


class Sealed(NamedTuple):
    """Test files without their literals."""

    files: dict[str, bytes]
    literals: dict[int, str]
    """Comparison to the source of the literal that it lost; empty for two computed values."""
    functions: dict[str, tuple[int, ...]]
    """``path::function`` to its comparisons, for plain functions whose comparisons run once each, one after another."""
    comparisons: int
    """All comparisons and other assertions that the files hold: sealed ones are `literals`."""
    places: dict[int, tuple[str, frozenset[str]]]
    """Comparison to its file and the functions that it is in."""


class _Comparison(NamedTuple):
    values: tuple[ast.expr, ...]
    """The observed values: one side, or both."""
    literal: str


def literal(node: ast.expr) -> bool:
    """Whether an expression is a literal."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def sides(node: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The two sides of a comparison for equality; None for any other statement."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        compare = node.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            return compare.left, compare.comparators[0]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        call = node.value
        if node.value.func.attr == "assertEqual" and len(call.args) >= 2:
            return call.args[0], call.args[1]
    return None


def _comparison(node: ast.stmt) -> _Comparison | None:
    compared = sides(node)
    if compared is None or any(isinstance(part, ast.Await | ast.Starred | ast.Yield) for part in ast.walk(node)):
        return None
    left, right = compared
    if not literal(left) and not literal(right):
        return _Comparison((left, right), "")
    if literal(left) and literal(right):
        return None
    value, wanted = (left, right) if literal(right) else (right, left)
    return _Comparison((value,), ast.unparse(wanted))


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.startswith("assert") or node.func.attr == "raises"
    return isinstance(node, ast.Assert)


def seal(files: Mapping[str, bytes], leave: Collection[int] = ()) -> Sealed:
    """The test files among `files`, sealed but for the comparisons whose numbers are in `leave`. Files that are not
    Python or hold nothing to seal are not in the answer."""
    sealed: dict[str, bytes] = {}
    literals: dict[int, str] = {}
    functions: dict[str, tuple[int, ...]] = {}
    places: dict[int, tuple[str, frozenset[str]]] = {}
    number = comparisons = 0
    for path in sorted(files):
        try:
            tree = parsed(files[path]) if path.endswith(".py") else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            continue
        inside = _enclosing(tree)  # the one walk over the tree: every task is sealed whenever it is made
        comparisons += sum(map(_asserts, inside))
        source = files[path]
        starts = line_starts(source)
        cuts: list[tuple[int, int, bytes]] = []
        numbers: dict[ast.stmt, int] = {}
        within: Counter[ast.AST] = Counter()
        statements = [node for node in inside if isinstance(node, ast.stmt)]
        for node in sorted(statements, key=lambda node: (node.lineno, node.col_offset)):
            comparison = _comparison(node)
            if comparison is None:
                continue
            if number not in leave:
                begin, end = span(starts, node)
                value = b"), (".join(source[slice(*span(starts, part))] for part in comparison.values)
                lines = b"\n" * (source[begin:end].count(b"\n") - value.count(b"\n"))
                cuts.append((begin, end, b"__observe__(%d, (%s%s))" % (number, value, lines)))
                literals[number] = comparison.literal
                numbers[node] = number
                places[number] = path, inside[node].functions
                within[inside[node].top] += 1
            number += 1
        for begin, end, text in reversed(cuts):
            source = source[:begin] + text + source[end:]
        if cuts:
            sealed[path] = source
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                straight = tuple(numbers[part] for part in node.body if part in numbers)
                if straight and len(straight) == within[node]:
                    functions[f"{path}::{node.name}"] = straight
    return Sealed(sealed, literals, functions, comparisons, places)


class _Around(NamedTuple):
    """The functions around a node, and its statement of the module."""

    functions: frozenset[str]
    top: ast.AST
    """The statement of the module that it belongs to; the module for itself."""


def _enclosing(tree: ast.Module) -> dict[ast.AST, _Around]:
    """Every node of a module, with what stands around it."""
    around: dict[ast.AST, _Around] = {tree: _Around(frozenset(), tree)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        functions, top = around[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions |= {node.name}
        inner = _Around(functions, top)
        for child in ast.iter_child_nodes(node):
            around[child] = inner if node is not tree else _Around(functions, child)
            waiting.append(child)
    return around


def seen_by(sealed: Sealed, tests: Collection[str]) -> frozenset[int]:
    """The comparisons inside these tests; where one has none of its own (it calls others), those of its whole file."""
    numbers: set[int] = set()
    for test in tests:
        path, _, name = test.partition("[")[0].partition("::")
        function = name.rpartition("::")[2]
        inside = {number for number, (place, around) in sealed.places.items() if place == path and function in around}
        numbers |= inside or {number for number, (place, _) in sealed.places.items() if place == path}
    return frozenset(numbers)


def line_starts(source: bytes) -> list[int]:
    """The place of every line's first byte, and the end."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def span(starts: Sequence[int], node: ast.stmt | ast.expr) -> tuple[int, int]:
    """The places of a node's first byte and of its end. starts: `line_starts` of its module."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def known(sealed: Sealed) -> Answers:
    """Answers of plain functions, from the text alone."""
    return {name: tuple((n, sealed.literals[n]) for n in numbers) for name, numbers in sealed.functions.items()}


def recorded(sealed: Sealed, tests: Sequence[TestOutcome], *others: Sequence[TestOutcome]) -> Answers:
    """Answers from a run that is known to be right: the same comparisons in the same order, with the literals.

    others: further right runs, in other processes. Two computed values that came out the same in all of them are
    recorded; without others none are. ValueError for outcomes that no right run gives.
    """
    answers: Answers = {}
    seen = [{test.name: test.observed for test in run} for run in others]
    for test in tests:
        numbers = tuple(decode(text)[0] for text in test.observed)
        if numbers:
            again = [run.get(test.name, ()) for run in seen]
            same = bool(again) and all(len(observed) == len(numbers) for observed in again)
            answers[test.name] = tuple(
                (number, sealed.literals[number] or (_constant(observed, *rest) if same else ""))
                for number, observed, *rest in zip(numbers, test.observed, *(again if same else ()), strict=True)
            )
    return answers


def _constant(*observed: str) -> str:
    """The one value that all observations of a comparison saw, as a literal; empty where there is none."""
    try:
        decoded = [decode(text) for text in observed]
        text = repr(_first(decoded[0][1]))
        right = all(number == decoded[0][0] and _equal(values, text) for number, values in decoded)
        return text if right and len(text) <= LARGEST else ""
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""


def pairs(sealed: Sealed, answers: Answers) -> tuple[int, int]:
    """Comparisons of two computed values: how many were recorded, and how many there are."""
    both = {number for number, literal in sealed.literals.items() if not literal}
    told = {number: True for answer in answers.values() for number, _ in answer if number in both}
    for answer in answers.values():
        told |= {number: False for number, text in answer if number in both and not text}
    return sum(told.values()), len(both)


def unequal(sealed: Sealed, tests: Sequence[TestOutcome]) -> frozenset[int]:
    """Comparisons that hold inside a right run and not outside it, such as those of objects with an ``__eq__``."""
    bad: set[int] = set()
    for test in tests:
        for text in test.observed:
            number = int(text[1 : text.index(",")])
            if number in sealed.literals and not equal(text, (number, sealed.literals[number])):
                bad.add(number)
    return frozenset(bad)


def too_much(tests: Sequence[TestOutcome]) -> frozenset[int]:
    """Comparisons of an unbounded run that see so much that others would exceed observing.LIMIT: the largest, as few as
    it takes."""
    sizes: Counter[int] = Counter()
    for test in tests:
        for text in test.observed:
            sizes[int(text[1 : text.index(",")])] += len(text)
    left, spare = set[int](), ALLOWANCE - sizes.total()
    for number, size in sizes.most_common():
        if spare >= 0:
            break
        spare += size
        left.add(number)
    return frozenset(left)


def equal(observed: str, answer: tuple[int, str]) -> bool:
    """Whether an observation is the answer, by Python's own ``==`` on this side. An unreadable observation
    equals nothing."""
    try:
        number, values = decode(observed)
    except ValueError:
        return False
    return number == answer[0] and _equal(values, answer[1])


def _equal(values: object, text: str) -> bool:
    """Whether all of the values are the one that a source names; without one, whether the two are equal."""
    if not text:
        return isinstance(values, tuple) and len(values) == 2 and bool(values[0] == values[1])
    wanted = ast.literal_eval(text)
    return isinstance(values, tuple) and len(values) > 0 and all(bool(value == wanted) for value in values)


def _first(values: object) -> object:
    if not isinstance(values, tuple) or not values:
        raise ValueError("no value")
    return values[0]


def compare_answers(
    tests: Sequence[TestOutcome], answers: Mapping[str, Sequence[tuple[int, str]]]
) -> tuple[TestOutcome, ...]:
    """The outcomes with the sealed comparisons made: a test that reported a pass and saw something else has failed."""
    settled = []
    for test in tests:
        answer = answers.get(test.name, ())
        wrong = next(
            (n for n, (seen, wanted) in enumerate(zip(test.observed, answer, strict=False)) if not equal(seen, wanted)),
            -1 if len(test.observed) == len(answer) else min(len(test.observed), len(answer)),
        )
        if test.outcome == "passed" and wrong >= 0:
            seen = test.observed[wrong] if wrong < len(test.observed) else "nothing"
            text = f"comparison {wrong + 1} of {len(answer)} saw {seen}"[:500]
            test = TestOutcome(test.name, "failed", text, test.observed)
        settled.append(test)
    return tuple(settled)
