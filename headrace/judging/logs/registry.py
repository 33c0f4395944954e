"""Parsers by name, and the part of a log that they read."""

import re

from headrace.errors import HeadraceError
from headrace.judging.logs import others, python
from headrace.judging.logs.base import Outcomes, Parser

PARSERS: dict[str, Parser] = {
    "pytest": python.pytest,
    "pytest_options": python.pytest_options,
    "pytest_spaces": python.pytest_spaces,
    "pytest_verbose": python.pytest_verbose,
    "matplotlib": python.matplotlib,
    "seaborn": python.seaborn,
    "unittest": python.unittest,
    "django": python.django,
    "sympy": python.sympy,
    "go": others.go,
    "cargo": others.cargo,
    "jest": others.jest,
    "tap": others.tap,
    "junit": others.junit,
}
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Lines around the tests' own output in the scripts of SWE-bench."""
FAILURES = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
_CODE = re.compile(r">>>>> Test Exit Code:\s*(-?\d+)")


class NotATestRun(HeadraceError, ValueError):
    """The log is not that of a test run; the text says why."""


class Contradicted(NotATestRun):
    """The log says that all tests passed, and the exit code says that they did not."""


def parse(name: str, log: str) -> Outcomes:
    """The outcomes in a log. NotATestRun where its script failed. Contradicted where the exit code contradicts it: a
    candidate that prints lines of passed tests and ends the run early leaves a code other than 0 and no failure."""
    if failure := next((text for text in FAILURES if text in log), ""):
        raise NotATestRun(f"the test script reports {failure.removeprefix('>>>>> ')!r}")
    inner = log
    if START in log:
        if END not in log:
            raise NotATestRun("the log ends before the tests did")
        inner = log.split(START, 1)[1].rsplit(END, 1)[0]
    outcomes = PARSERS[name](inner) or PARSERS[name](log)
    code = _CODE.search(log.rpartition(END)[2])
    if code and code[1].strip("-0") and outcomes and not {"failed", "error"} & set(outcomes.values()):
        raise Contradicted(f"the tests ended with exit code {code[1]}, and no failure is in the log")
    return outcomes
