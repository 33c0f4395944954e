"""A candidate writes the log or reward file: any text is no reward, in time in proportion to its size."""

import random
import time

import pytest

from headrace.judging.grading import examined
from headrace.judging.logs.registry import END, PARSERS, START, NotATestRun, parse
from headrace.judging.outcomes import RefusedOutput
from headrace.messages.sandbox import OpResult
from headrace.messages.tasks import Grading, Oracle, TaskRef, TestPlan
from tests.judging.logs.test_parsers import CASES

SECRET = "test_hidden.py::test_secret_of_the_host"
ODD = ("\x00", "\ud800", "é", "[" * 300, "9" * 5_000, "\r", "\n", "<", "&#0;", "1e999", "_" * 50, " ... ", "{}", "-")
REWARDS = ("9" * 400, "-" + "9" * 5_000, "NaN", '{"reward": 1e999}', "[" * 9_000, '{"a": {}}', '{"reward": null}', "")
SLOW = {  # begin, middle that is repeated, end
    "pytest_options": ("PASSED ", "[", ""),
    "sympy": ("", "_", ""),
    "sympy paths": ("_ ", ".py:", ""),
    "sympy spaces": ("_ .py:", " _", "x"),
    "go": ("--- PASS: ", " (", ""),
    "django": ("", "x ... Testing against Django installed in\n", ""),
    "django paths": ("x", " ... Internal Server Error: /", ""),
    "jest": ("✓ ", " (1", ""),
    "tap": ("ok 1 ", " # ", ""),
    "cargo": ("test ", "a ... ", ""),
    "unittest": ("", "w.", ""),
}


@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_log_is_read_in_time_in_proportion_to_its_size(name: str) -> None:
    begin, middle, end = SLOW[name]
    parser = name.partition(" ")[0]

    def seconds(size: int) -> float:
        log = begin + middle * (size // len(middle)) + end
        taken = []
        for _ in range(3):
            started = time.process_time()
            parse(parser, log)
            taken.append(time.process_time() - started)
        return min(taken)

    size = 3_000 if name == "pytest_options" else 96_000  # it took the third power of the size
    assert seconds(size) < 40 * max(seconds(size // 8), 0.002)  # linear: 8, quadratic: 64, cubic: 512


def forged(random_: random.Random, name: str) -> str:
    """The log of a case, cut, joined and damaged in places."""
    parts = [random_.choice(CASES[random_.choice([name, name, *CASES])][0].splitlines(True)) for _ in range(6)]
    text = "".join(parts)
    for _ in range(random_.choice([0, 1, 1, 4])):
        at = random_.randrange(len(text) + 1)
        text = text[:at] + random_.choice(ODD) + text[at + random_.randrange(20) :]
    if random_.random() < 0.3:
        text = (
            f"{START}\n{text}\n{random_.choice([END, ''])}\n>>>>> Test Exit Code: {random_.choice(['0', '1', *ODD])}\n"
        )
    return text


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_forged_log_or_reward_file_has_a_verdict_and_no_reward(count: int) -> None:
    random_ = random.Random(2026)
    ends = {"refused": 0, "not passed": 0}
    names = sorted(PARSERS)
    for number in range(count):
        written: bytes | None = None
        if number % 8:
            name = names[number % len(names)]
            log = forged(random_, name)
            in_file = random_.random() < 0.5
            grading = Grading(kind="f2p_p2p", parser=name, file="log" if in_file else "", trust="log")
            written = log.encode("utf-8", "surrogatepass") if in_file else None
            result = OpResult(stdout="" if in_file else log)
        else:
            text = forged(random_, "tap") if random_.random() < 0.3 else random_.choice(REWARDS)
            grading, result = Grading(kind="reward_file", file="r"), OpResult()
            written = random_.choice([text.encode("utf-8", "surrogatepass"), None, b"\xff\x00", b"\xff\xfe1"])
        oracle = Oracle(
            ref=TaskRef("toy", "1"), hidden={}, tests=TestPlan(), expected=(SECRET,), solution={}, grading=grading
        )
        try:
            examination = examined(oracle, result, written, touched=(), alone=True)
        except RefusedOutput:
            ends["refused"] += 1
            continue
        assert not examination.ok
        ends["not passed"] += 1
    assert min(ends.values()) > count // 20


def test_an_exit_code_of_any_length_is_read() -> None:
    with pytest.raises(NotATestRun, match="and no failure is in the log"):
        parse("pytest", f"PASSED a.py::x\n>>>>> Test Exit Code: {'9' * 5_000}\n")
    assert parse("pytest", "PASSED a.py::x\n>>>>> Test Exit Code: -0\n") == {"a.py::x": "passed"}
