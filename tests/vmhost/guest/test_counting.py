"""The slot's agent counts tests that are collected, started and ended, and takes no report that disagrees."""

import json
from typing import Any

import pytest

from headrace.vmhost.guest.testing.pytests import Miscounted, counted

COLLECTED: list[Any] = [["collected", "a.py::test_a"], ["collected", "a.py::test_b"]]
RAN: list[Any] = [["started", 0], ["ended", 0], ["started", 1], ["ended", 1]]
ROWS: list[Any] = [[0, "passed", "", ["x"]], [1, "failed", "why", []]]
BOTH = [("a.py::test_a", "passed", "", ["x"]), ("a.py::test_b", "failed", "why", [])]


def sent(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_an_ordinary_run_is_read() -> None:
    assert counted(sent(*COLLECTED, *RAN, ["finished", 1, ROWS]), 1) == BOTH
    again = [["started", 0], ["ended", 0], *RAN]
    assert counted(sent(*COLLECTED, *again, ["finished", 1, ROWS]), 1) == BOTH, "a test that is repeated"
    broken = [["b.py", "error", "SyntaxError", []]]
    assert counted(sent(["finished", 2, broken]), 2) == [("b.py", "error", "SyntaxError", [])]
    stopped = [*COLLECTED, *RAN[:2], ["finished", 2, ROWS[:1]]]
    assert counted(sent(*stopped), 2) == BOTH[:1], "a run that stops at the first failure"


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        ([], 0, "ended after 0 of 0 tests"),
        ([*COLLECTED, *RAN[:3]], 0, "ended after 1 of 2 tests"),
        ([["finished", 0, [["a.py::test_a", "passed", "", []]]]], 0, "a.py::test_a, which did not end"),
        ([*COLLECTED, *RAN[:3], ["finished", 0, [[1, "passed", "", []]]]], 0, "a.py::test_b, which did not end"),
        ([*COLLECTED, *RAN, ["finished", 0, ROWS]], 1, "reported exit code 0 and ended with 1"),
        ([*COLLECTED, *RAN, ["finished", 0, ROWS], ["started", 0], ["finished", 0, ROWS]], 0, "out of turn|values"),
        ([*COLLECTED, ["ended", 0], ["finished", 0, []]], 0, "ended 0 out of turn"),
        ([*COLLECTED, ["started", 0], ["started", 0], ["finished", 0, []]], 0, "started 0 out of turn"),
        ([*COLLECTED, ["started", 2], ["finished", 0, []]], 0, "started 2 out of turn"),
        ([*COLLECTED, ["passed", 0], ["finished", 0, []]], 0, "passed 0 out of turn"),
    ],
)
def test_a_report_that_disagrees_is_none(lines: list[Any], code: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        counted(sent(*lines), code)


@pytest.mark.parametrize(
    "data", [b"{}\n", b"[]\n", b"[1]\n", b'["finished"]\n', b"x\n", b'["started", "0"]\n', b"\xff\n"]
)
def test_lines_that_pytest_does_not_write_are_no_report(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
        counted(data, 0)
    assert issubclass(Miscounted, ValueError)
