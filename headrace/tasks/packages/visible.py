"""Which of a package's tests an agent may see: about half of the test functions, cut out of their files by the
syntax tree.

If all were visible, a repair that satisfies just them could not be told from a real one; if none that fails were, there
would be no symptom.
"""

import ast
import random
from collections.abc import Collection, Sequence

from headrace.syntax_trees import parsed


def _function(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


def choose(names: Sequence[str], failing: Sequence[str], rng: random.Random) -> frozenset[str]:
    """Functions (``path::function`` or ``path::Class::method``) to show: half of all, and of the failing ones at least
    one but, where there are two or more, not all."""
    bad = sorted({_function(name) for name in failing})
    good = sorted({_function(name) for name in names} - set(bad))
    shown = rng.sample(bad, max(1, len(bad) // 2)) + rng.sample(good, len(good) // 2)
    return frozenset(shown)


def thin(source: bytes, keep: Collection[str]) -> bytes:
    """A test file without the test functions that are not in `keep` (``function`` or ``Class::method``).

    A function that is used by name stays: tests call and wrap each other.
    """
    tree = parsed(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    lines = source.splitlines(keepends=True)
    drop: set[int] = set()
    filled: dict[int, bytes] = {}

    def cut(body: Sequence[ast.stmt], prefix: str) -> int:
        """Mark the statements to remove; return the number of the others."""
        left = len(body)
        for node in body:
            assert node.end_lineno is not None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test") and prefix + node.name not in keep and node.name not in used:
                    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    drop.update(range(start, node.end_lineno + 1))
                    left -= 1
            elif isinstance(node, ast.ClassDef) and not cut(node.body, f"{prefix}{node.name}::"):
                first = node.body[0].lineno
                filled[first] = b" " * node.body[0].col_offset + b"pass\n"
        return left

    cut(tree.body, "")
    return b"".join(
        filled[number] if number in filled else line
        for number, line in enumerate(lines, 1)
        if number in filled or number not in drop
    )
