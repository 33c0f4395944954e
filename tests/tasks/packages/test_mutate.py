"""Mutations: each changes one place, compiles, and leaves what is no code alone."""

import ast

import pytest

from headrace.tasks.packages.mutate import mutations

SOURCE = '''"""Doc with 1 < 2."""
LIMIT = 3


def clamp(value: int, low: int = 0, high: int = 10) -> int:
    """Not here: 1 + 1 == 2."""
    # ä comment with < and 7
    if value < low and not high:
        return swap(low, high)
    text = f"{value + 1}" + "a"
    return -value * (high - 1) if value in (low, high) else value % 2


class Äpfel:
    def names(self):
        return [n for n in self.all if n is not None]  # ünïcödé
'''.encode()


def test_kinds_and_places() -> None:
    mutants = list(mutations("m.py", SOURCE))
    assert {m.kind for m in mutants} == {"comparison", "arithmetic", "logic", "return", "argument", "boundary"}
    changed = {(m.line, m.before, m.after) for m in mutants}
    assert {
        (8, "<", "<="),
        (8, "<", ">"),
        (8, "and", "or"),
        (8, "not ", ""),
        (9, "low, high", "high, low"),
        (9, "swap(low, high)", "None"),
        (11, "-", ""),
        (11, "*", "+"),
        (11, "in", "not in"),
        (11, "%", "//"),
        (11, "1", "2"),
        (11, "1", "0"),
        (16, "is not", "is"),
    } <= changed
    assert not {line for line, _, _ in changed} & {1, 2, 5, 6, 7, 10}, "no docstring, constant, signature, f-string"


def test_each_changes_one_place_and_compiles() -> None:
    for mutation in mutations("m.py", SOURCE):
        broken = mutation.apply(SOURCE)
        ast.parse(broken)
        before, after = SOURCE.decode().splitlines(), broken.decode().splitlines()
        assert [i for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [mutation.line]
        with pytest.raises(ValueError, match="is not"):
            mutation.apply(b"x" + SOURCE)


def test_what_is_no_python_has_none() -> None:
    assert list(mutations("m.py", b"def f(:")) == [] == list(mutations("m.py", b"a = '\0'"))
