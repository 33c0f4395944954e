"""Broken solutions: the known solution with empty functions, or with one mutation in a function that it changes."""

import ast
import random
from collections.abc import Mapping
from difflib import SequenceMatcher

from headrace.messages.tasks import TaskRef
from headrace.syntax_trees import parsed
from headrace.tasks.packages.mutate import mutations

Files = dict[str, bytes]


def _changed_functions(before: bytes, after: bytes) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The innermost functions of `after` with a line that differs from `before`. None of them for text that is not
    Python."""
    try:
        tree = parsed(after)
    except (SyntaxError, ValueError):
        return []
    old, new = before.splitlines(), after.splitlines()
    lines: set[int] = set()
    for kind, _, _, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            lines.update(range(first + 1, max(last, first + 1) + 1))
    functions: dict[int, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for line in lines:
        around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
        if around:
            inner = max(around, key=lambda node: node.lineno)
            functions[inner.lineno] = inner
    return [functions[line] for line in sorted(functions)]


def stubs(before: Mapping[str, bytes], solution: Mapping[str, bytes]) -> Files:
    """The solution with ``return None`` as the body of every function that it changes; empty without one. before: the
    files that an attempt begins with."""
    made: Files = {}
    for path, content in solution.items():
        functions = _changed_functions(before.get(path, b""), content) if path.endswith(".py") else []
        lines = content.splitlines(keepends=True)  # of bytes: the lines that a syntax tree numbers
        for function in reversed(functions):
            first = function.body[0]
            if first.lineno == function.lineno:  # a body on the line of its def
                continue
            lines[first.lineno - 1 : function.end_lineno] = [b" " * first.col_offset + b"return None\n"]
            made[path] = b"".join(lines)
    return made


def mutants(ref: TaskRef, before: Mapping[str, bytes], solution: Mapping[str, bytes]) -> list[tuple[str, Files]]:
    """Broken solutions by name, all mutations of the functions that the solution changes, in an order that the task's
    id draws; the task's own bug is not among them."""
    candidates: list[tuple[str, Files]] = []
    for path, content in sorted(solution.items()):
        if not path.endswith(".py"):
            continue
        original = before.get(path, b"")
        ranges = [(f.body[0].lineno, f.end_lineno or f.lineno) for f in _changed_functions(original, content)]
        for mutation in mutations(path, content):
            if any(first <= mutation.line <= last for first, last in ranges):
                broken = mutation.apply(content)
                if broken != original:
                    name = f"{path}:{mutation.line}: {mutation.before} -> {mutation.after}"
                    candidates.append((name, {path: broken}))
    random.Random(f"certify/{ref.suite}/{ref.task}").shuffle(candidates)
    return candidates
