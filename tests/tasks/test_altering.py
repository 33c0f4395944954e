"""Altered tests fail whatever the code does, and keep names and shape."""

import ast
import random
from typing import Any

import pytest

from headrace.tasks.altering import altered

CODE: dict[str, Any] = {"add": lambda a, b: a + b, "name": lambda: "x", "rows": lambda: [1, 2], "same": lambda x: x}
SOURCE = b'''"""A module."""
import pytest


def helper():
    assert add(1, 1) == 2


def test_int():
    helper()
    assert add(1, 2) == 3


def test_text(): assert name() == "x"


def test_both():
    assert same(name()) == name()


def test_reversed():
    assert [1, 2] == rows()


def test_truth():
    assert name()
    assert name() != "y"


def test_leaves():
    if name():
        return
    assert name() == "y"


def test_raises():
    try:
        add(1)
    except TypeError:
        pass


@pytest.mark.xfail
def test_known():
    assert add(1, 1) == 3


class TestMore:
    def test_add(self):
        assert add(
            1, 2
        ) == 3

    async def helper(self): ...'''
NAMES = ("int", "text", "both", "reversed", "truth", "leaves", "raises")


def run(source: bytes, **code: Any) -> dict[str, bool]:
    """Whether each test passes."""
    space: dict[str, Any] = {**CODE, **code}
    exec(source, space)
    space["test_add"] = space["TestMore"]().test_add
    passed = {}
    for test in ("test_add", *(f"test_{name}" for name in NAMES)):
        try:
            space[test]()
            passed[test] = True
        except AssertionError:
            passed[test] = False
    return passed


@pytest.mark.parametrize("seed", range(20))
def test_a_right_repair_fails_every_altered_test(seed: int) -> None:
    [(source, changed)] = altered({"test_a.py": SOURCE}, random.Random(seed)).values()
    assert changed == {"test_add", *(f"test_{name}" for name in NAMES)}, "a test that is to fail stays as it is"
    assert set(run(SOURCE).values()) == {True} and set(run(source).values()) == {False}
    before, after = (
        [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for text in (SOURCE, source)
    )
    assert before == after


def test_what_equals_everything_passes_altered_comparisons() -> None:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return True

    everything: dict[str, Any] = {"add": lambda *_: Any_(), "name": Any_, "rows": Any_, "same": lambda x: Any_()}
    source, _ = altered({"test_a.py": SOURCE.replace(b"    helper()\n", b"")}, random.Random(1))["test_a.py"]
    passed = run(source, **everything)
    assert {name for name, ok in passed.items() if ok} == {
        f"test_{name}" for name in ("int", "text", "both", "reversed", "add")
    }


def test_only_the_wanted_functions_change() -> None:
    [(source, changed)] = altered({"t.py": SOURCE, "u.py": SOURCE}, random.Random(1), {"t.py": ["test_int"]}).values()
    assert changed == {"test_int"}
    assert [name for name, ok in run(source).items() if not ok] == ["test_int"]


def test_scripts_and_patches() -> None:
    draw = random.Random(1)
    script = b"from calc import add\nassert add(1, 2) == 3\n"
    patch = b"--- a/t.py\n+++ b/t.py\n@@ -1 +1,3 @@\n def test_a():\n+    assert add(1, 2) == 3\n-    assert 1 == x\n"
    other = b"--- a/t.c\n+++ b/t.c\n@@ -1 +1 @@\n+assert add(1, 2) == 3\n"
    made = altered({"run.py": script, "a.patch": patch + other, "test.sh": b"exit 0", "conftest.py": b"x = 1\n"}, draw)
    assert made.keys() == {"run.py", "a.patch"}
    with pytest.raises(AssertionError):
        exec(made["run.py"][0].replace(b"from calc import add\n", b""), dict(CODE))
    changed, lines = made["a.patch"][0].split(b"\n"), (patch + other).split(b"\n")
    differ = [number for number, line in enumerate(lines) if changed[number] != line]
    assert differ == [4] and changed[4].startswith(b"+    assert add(1, 2) == ") and len(changed) == len(lines)


@pytest.mark.parametrize("source", [b"def", b"\xff\xfe", b"", b"def test_a(x=(" * 300, b"x = '\0'"])
def test_what_is_no_python_has_no_altered_copy(source: bytes) -> None:
    assert altered({"test_a.py": source}, random.Random(1)) == {}
