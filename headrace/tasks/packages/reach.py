"""Which tests of a package reach which function: from one run with a trace of calls, in a sandbox.

A change of a function that no test calls cannot be noticed, and one that few tests call is tried with those first
(sdist.py). Calls outside of any test (imports, collection) belong to all tests. The calls of a fixture of a module or
session belong to the test that set it up. Calls in processes that tests start are not seen, nor those of pytest's hooks
between the set-up, call and tear-down of tests, where most of the time goes into pytest itself: a change may then look
unnoticed and is not used, but no task is wrong, because whole runs decide about every task.
"""

import ast
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from headrace.messages.sandbox import Exec, ReadFile, SandboxLost
from headrace.messages.tasks import TestPlan
from headrace.syntax_trees import parsed
from headrace.tasks.packages.lab import Lab, SuiteError
from headrace.tasks.packages.mutate import Mutation

_FOLDER = ".headrace-reach"
_ROOM = 32 << 20
_RUN = f"""
import json, os, sys, threading
root = os.getcwd() + os.sep
for folder in (root + "src", root[:-1]):
    if os.path.isdir(folder):
        sys.path.insert(0, folder)
import pytest
numbers, tests, now = {{}}, {{}}, set()
outside = now
def trace(frame, event, argument):
    code = frame.f_code
    if code.co_filename.startswith(root):
        now.add((code.co_filename[len(root):], code.co_firstlineno))
class Reach:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        global now
        now = tests.setdefault(item.nodeid, set())
        yield
        now = outside
    def pytest_collection_finish(self):
        sys.settrace(None)
    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_setup(self):
        threading.settrace(trace)
        sys.settrace(trace)
        yield
        sys.settrace(None)
    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup
sys.settrace(trace)
pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Reach()])
sys.settrace(None)
def some(found):
    return [numbers.setdefault(each, len(numbers)) for each in sorted(found)]
report = {{"outside": some(outside), "tests": {{name: some(found) for name, found in tests.items()}}}}
report["functions"] = list(numbers)
with open("{_FOLDER}/report", "w") as file:
    json.dump(report, file)
os._exit(0)
"""

Place = tuple[str, int]
"""Path and first line of a function, its decorators included."""


class _Report(msgspec.Struct):
    """The report of the traced run. A package may write something else there."""

    outside: list[int]
    tests: dict[str, list[int]]
    functions: list[Place]


class Reach(NamedTuple):
    """Tests by what they call."""

    outside: frozenset[Place]
    tests: Mapping[str, frozenset[Place]]

    def of(self, mutation: Mutation, source: bytes) -> frozenset[str] | None:
        """The tests that call the changed function, or what is defined in it; None: any test may."""
        around = _around(source, mutation.line)
        if around is None:
            return None
        first, last = around

        def inside(places: Iterable[Place]) -> bool:
            return any(path == mutation.path and first <= line <= last for path, line in places)

        if inside(self.outside):
            return None
        return frozenset(name for name, places in self.tests.items() if inside(places))


def _around(source: bytes, line: int) -> tuple[int, int] | None:
    """First and last line of the innermost function around a line."""
    extent = None
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= line <= node.end_lineno and (extent is None or first > extent[0]):
                extent = (first, node.end_lineno)
    return extent


async def traced(lab: Lab, files: Mapping[str, bytes], plan: TestPlan, lane: int = 0) -> Reach:
    """The calls of every test over the untouched package. SuiteError where the run gives no report."""
    tree = {**files, f"{_FOLDER}/run.py": _RUN.encode()}
    argv = ("python3", "-B", f"{_FOLDER}/run.py", *plan.paths)
    try:
        async with lab.sandbox(tree, lane, False) as sandbox:
            ran = await sandbox.call(Exec(argv=argv, timeout_s=plan.timeout_s))
            answer = await sandbox.call(ReadFile(path=f"{_FOLDER}/report", limit=_ROOM))
        report = msgspec.json.decode(answer.data, type=_Report)
        places = report.functions
        return Reach(
            frozenset(places[number] for number in report.outside),
            {name: frozenset(places[number] for number in numbers) for name, numbers in report.tests.items()},
        )
    except SandboxLost as error:
        raise SuiteError(f"the traced run lost its sandbox: {error}") from None
    except (ValueError, IndexError, RecursionError):
        lines = f"{ran.stdout}\n{ran.stderr}".strip().splitlines()
        raise SuiteError(
            f"the traced run gives no report: {lines[-1] if lines else ran.error or answer.error}"[:300]
        ) from None
