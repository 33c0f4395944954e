"""Which tests call which function: from a traced run in a real sandbox."""

from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.tasks import TestPlan
from headrace.tasks.packages.fetch import read
from headrace.tasks.packages.lab import Lab, SuiteError
from headrace.tasks.packages.mutate import mutations
from headrace.tasks.packages.reach import traced
from headrace.vmhost.node.host import Host

pytestmark = pytest.mark.anyio

CODE = """import functools


def early(x):
    return x + 1


FOUR = early(3)


def add(a, b):
    return a + b


@functools.lru_cache
def less(a, b):
    return (lambda: a - b)()


def never(a):
    return a * 2
"""
TESTS = """import threading

from sums import add, less


def test_add():
    assert add(1, 2) == 3


def test_less():
    assert less(3, 2) == 1


def test_thread():
    thread = threading.Thread(target=add, args=(1, 2))
    thread.start()
    thread.join(60)
"""


async def test_a_change_is_reached_by_the_tests_that_call_its_function(tmp_path: Path) -> None:
    for path, text in {"sums.py": CODE, "tests/test_sums.py": TESTS}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    package = read(tmp_path, "sums-1.0")
    host = await Host.open(Environment(backend="process", max_vms=8))
    try:
        lab = Lab(host, "reach", "debian")
        reach = await traced(lab, package.files, TestPlan(kind="pytest", paths=package.tests, timeout_s=120))
        with pytest.raises(SuiteError, match="gives no report"):
            await traced(lab, {**package.files, "pytest.py": b"raise OSError"}, TestPlan(paths=package.tests))
        for text in ("'[' * 100_000", "'[]'", '\'{"outside": [1e999], "tests": [], "functions": []}\'', "'9' * 5_000"):
            forger = f"import os\nopen('.headrace-reach/report', 'w').write({text})\nos._exit(0)\n"
            with pytest.raises(SuiteError, match="gives no report"):
                await traced(lab, {**package.files, "pytest.py": forger.encode()}, TestPlan(paths=package.tests))
    finally:
        await host.close()
    source = package.files["sums.py"]
    reached: dict[str, set[frozenset[str] | None]] = {}
    for mutation in mutations("sums.py", source):
        function = next(name for name in ("never", "less", "add", "early") if _starts(name) < mutation.line)
        reached.setdefault(function, set()).add(reach.of(mutation, source))
    tests = "tests/test_sums.py::test_"
    assert reached == {
        "early": {None},
        "add": {frozenset({f"{tests}add", f"{tests}thread"})},
        "less": {frozenset({f"{tests}less"})},
        "never": {frozenset()},
    }


def _starts(function: str) -> int:
    return 1 + CODE[: CODE.index(f"def {function}")].count("\n")
