"""Logs of each framework become outcomes; a log that is not that of a test run is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.judging.logs.base import Outcomes
from headrace.judging.logs.registry import END, PARSERS, START, NotATestRun, parse

JEST = """PASS src/a.test.js
  adding
    ✓ adds two numbers (2 ms)
    ✕ subtracts two numbers (1.5 s)
    ○ skipped later
Tests: 1 failed, 1 skipped, 1 passed, 3 total
"""
CASES: dict[str, tuple[str, Outcomes]] = {
    "pytest": (
        "\x1b[32mPASSED\x1b[0m a.py::test_one\nFAILED a.py::test_two - assert 1 == 2\nERROR b.py - ImportError: x\n"
        "SKIPPED [3] a.py:4: no network\nXFAIL a.py::test_known\nPASSED\n=== 1 passed ===\n",
        {"a.py::test_one": "passed", "a.py::test_two": "failed", "b.py": "error", "a.py::test_known": "passed"},
    ),
    "pytest_options": (
        "PASSED a.py::test_x[/tmp/of/a/machine/f.txt]\nPASSED a.py::test_x[/*/b]\n",
        {"a.py::test_x[/f.txt]": "passed", "a.py::test_x[/*/b]": "passed"},
    ),
    "pytest_spaces": (
        "PASSED a.py::test_x[a b]\nFAILED a.py::test_y[c d] - assert\na.py::test_z[e f] PASSED\n",
        {"a.py::test_x[a b]": "passed", "a.py::test_y[c d]": "failed", "a.py::test_z[e f]": "passed"},
    ),
    "pytest_verbose": (
        "a.py::test_one PASSED   [ 50%]\n[gw1] [ 75%] FAILED a.py::test_two \n[gw0] PASSED a.py::test_three\n",
        {"a.py::test_one": "passed", "a.py::test_two": "failed", "a.py::test_three": "passed"},
    ),
    "matplotlib": ("PASSED a.py::t[MouseButton.LEFT]\n", {"a.py::t[1]": "passed"}),
    "seaborn": (
        "a.py::one PASSED [ 50%]\nPASSED b.py::two\nFAILED c.py::three\nPASSED\n",
        {"a.py::one": "passed", "b.py::two": "passed", "c.py::three": "failed"},
    ),
    "unittest": (
        "test_a (tests.TestX.test_a) ... ok\ntest_b (tests.TestX.test_b) ... FAIL\n"
        "test_c (tests.TestX.test_c) ... skipped 'later'\ntest_d (tests.TestX.test_d) ... expected failure\n"
        "test_e (tests.TestX.test_e) ... a line of output\nok\nRan 5 tests in 0.1s\n",
        {
            "test_a (tests.TestX.test_a)": "passed",
            "test_b (tests.TestX.test_b)": "failed",
            "test_c (tests.TestX.test_c)": "skipped",
            "test_d (tests.TestX.test_d)": "passed",
            "test_e (tests.TestX.test_e)": "passed",
        },
    ),
    "django": (
        "test_a (auth.tests.TestX) ... ok\nA docstring of a test. ... ok\ntest_b (auth.tests.TestX) ... FAIL\n"
        "test_c (auth.tests.TestX) ... skipped 'no GIS'\ntest_d (auth.tests.TestX) ... some output\nok\n"
        "test_e (auth.tests.TestX) ... ERROR\n"
        "test_f (auth.tests.TestX) ... System check identified no issues (0 silenced)\nok\n",
        {
            "test_a (auth.tests.TestX)": "passed",
            "A docstring of a test.": "passed",
            "test_b (auth.tests.TestX)": "failed",
            "test_c (auth.tests.TestX)": "skipped",
            "test_d (auth.tests.TestX)": "passed",
            "test_e (auth.tests.TestX)": "error",
            "test_f (auth.tests.TestX)": "passed",
        },
    ),
    "sympy": (
        "sympy/core/tests/test_x.py[3] \ntest_one ok\ntest_two F\ntest_three E\n"
        "____________ sympy/core/tests/test_x.py:test_two ____________\n",
        {
            "sympy/core/tests/test_x.py:test_two": "failed",
            "test_one": "passed",
            "test_two": "failed",
            "test_three": "error",
        },
    ),
    "go": (
        "=== RUN TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestB/sub_case (0.01s)\n--- SKIP: TestC (0.00s)\nFAIL\n",
        {"TestA": "passed", "TestB/sub_case": "failed", "TestC": "skipped"},
    ),
    "cargo": (
        "running 3 tests\ntest a::one ... ok\ntest a::two ... FAILED\ntest a::three ... ignored\ntest result: ok.\n",
        {"a::one": "passed", "a::two": "failed", "a::three": "skipped"},
    ),
    "jest": (JEST, {"adds two numbers": "passed", "subtracts two numbers": "failed", "skipped later": "skipped"}),
    "tap": (
        "TAP version 13\nok 1 opens\nnot ok 2 closes\nok 3 waits # SKIP no clock\nnot ok 4 later # TODO\n1..4\n",
        {"opens": "passed", "closes": "failed", "waits": "skipped", "later": "passed"},
    ),
    "junit": (
        '<testsuite><testcase classname="a.B" name="one"/><testcase classname="a.B" name="two"><failure/></testcase>'
        '<testcase classname="a" name="three"><skipped/></testcase>'
        '<testcase classname="a" name="four"><skipped type="pytest.xfail" message="known"/></testcase></testsuite>',
        {"a.B::one": "passed", "a.B::two": "failed", "a::three": "skipped", "a::four": "passed"},
    ),
}


def test_every_parser_has_a_case() -> None:
    assert CASES.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_log_becomes_outcomes(name: str) -> None:
    log, expected = CASES[name]
    assert parse(name, log) == expected
    assert parse(name, log.replace("\n", "\r\n")) == expected


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_no_parser_raises(name: str) -> None:
    for log in ("", "\n", "PASSED", " ... ", "ok", "test_", "<a", "\x00\x1b[", "--- PASS:  ()", "FAIL:", "[gw0]"):
        assert isinstance(parse(name, log), dict)


def test_an_entity_is_not_expanded() -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]><testsuite><testcase name="&a;"/></testsuite>'
    assert parse("junit", bomb) == {}


def test_the_tests_own_part_of_a_log_counts() -> None:
    log = f"PASSED a.py::before\n{START}\nPASSED a.py::test_x\n{END}\nPASSED a.py::after\n"
    assert parse("pytest", log) == {"a.py::test_x": "passed"}


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (f"{START}\nPASSED a.py::x\n", "ends before the tests did"),
        (">>>>> Patch Apply Failed\nPASSED a.py::x\n", "Patch Apply Failed"),
        (f"{START}\nPASSED a.py::x\n{END}\n>>>>> Test Exit Code: 1\n", "exit code 1, and no failure"),
    ],
)
def test_a_log_of_something_else_is_refused(log: str, why: str) -> None:
    with pytest.raises(NotATestRun, match=why):
        parse("pytest", log)


SOURCE = """
import unittest

class TestX(unittest.TestCase):
    def test_good(self):
        print("noise")
    def test_bad(self):
        self.assertEqual(1, 2)
    @unittest.skip("later")
    def test_later(self):
        pass
"""


def test_runners_of_this_machine_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_real.py").write_text(SOURCE)

    def log(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout

    words = {"good": "passed", "bad": "failed", "later": "skipped"}
    name = "test_real.py::TestX::test_"
    assert parse("pytest_verbose", log("pytest", "-v", "-p", "no:cacheprovider")) == {
        f"{name}{key}": word for key, word in words.items()
    } | {f"{name}bad": "failed"}
    summary = parse("pytest", log("pytest", "-rA", "-p", "no:cacheprovider"))
    assert summary == {f"{name}good": "passed", f"{name}bad": "failed"}, "skips are counted, not named"
    read = parse("unittest", log("unittest", "-v"))
    assert {key.partition(" ")[0].removeprefix("test_"): word for key, word in read.items()} == words
    log("pytest", "-q", "--junitxml=report.xml", "-p", "no:cacheprovider")
    read = parse("junit", (tmp_path / "report.xml").read_text())
    assert read == {f"test_real.TestX::test_{key}": word for key, word in words.items()}
