"""The slot's agent counts tests that are collected, started and ended, and takes no report that disagrees."""

import json
from typing import Any

import pytest

from headrace.vmhost.guest.testing.pytests import Miscounted, counted

COLLECTED: list[Any] = [["collected", "a.py::test_a"], ["collected", "a.py::test_b"]]
FIRST: list[Any] = [["started", 0], ["outcome", 0, "passed", ""], ["ended", 0, ["x"]]]
SECOND: list[Any] = [["started", 1], ["outcome", 1, "failed", "why"], ["ended", 1, []]]
RAN: list[Any] = [*FIRST, *SECOND]
BOTH = [("a.py::test_a", "passed", "", ["x"]), ("a.py::test_b", "failed", "why", [])]


def sent(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_an_ordinary_run_is_read() -> None:
    assert counted(sent(*COLLECTED, *RAN, ["finished", 1, []]), 1) == BOTH
    again = [["started", 0], ["outcome", 0, "passed", ""], ["ended", 0, []], *RAN]
    assert counted(sent(*COLLECTED, *again, ["finished", 1, []]), 1) == BOTH, "a test that is repeated"
    broken = [["b.py", "SyntaxError"]]
    assert counted(sent(["finished", 2, broken]), 2) == [("b.py", "error", "SyntaxError", [])]
    stopped = [*COLLECTED, *FIRST, ["finished", 2, []]]
    assert counted(sent(*stopped), 2) == BOTH[:1], "a run that stops at the first failure"
    silent = [*COLLECTED, *FIRST, ["started", 1], ["ended", 1, []], ["finished", 0, []]]
    assert counted(sent(*silent), 0) == BOTH[:1], "a test without a report"
    crashed = [*COLLECTED, *FIRST, ["outcome", 1, "error", "why"], ["finished", 1, []]]
    lost: tuple[Any, ...] = ("a.py::test_b", "error", "why", [])
    assert counted(sent(*crashed), 1) == [BOTH[0], lost], "an error of a test whose worker crashed"


def test_a_failure_that_was_told_is_not_taken_back() -> None:
    later = [["started", 1], ["outcome", 1, "passed", ""], ["ended", 1, []]]
    assert counted(sent(*COLLECTED, *RAN, *later, ["finished", 0, []]), 0) == BOTH


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        ([], 0, "ended after 0 of 0 tests"),
        ([*COLLECTED, *RAN[:4]], 0, "ended after 1 of 2 tests"),
        ([*COLLECTED, *RAN[:5], ["finished", 0, []]], 0, "a.py::test_b, which did not end"),
        ([*COLLECTED, ["outcome", 0, "failed", ""], ["finished", 0, []]], 0, "outcome 0 out of turn"),
        ([*COLLECTED, ["outcome", 0, "passed", ""], ["finished", 0, []]], 0, "outcome 0 out of turn"),
        ([*COLLECTED, *RAN, ["finished", 0, []]], 1, "reported exit code 0 and ended with 1"),
        ([*COLLECTED, *RAN, ["finished", 0, []], ["started", 0], ["finished", 0, []]], 0, "out of turn|values"),
        ([*COLLECTED, ["ended", 0, []], ["finished", 0, []]], 0, "ended 0 out of turn"),
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
