"""Which values of the untouched code become answers: those that come out the same wherever and whenever it runs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.tasks import TestPlan
from headrace.tasks import sealing
from headrace.tasks.packages.fetch import Package, read
from headrace.tasks.packages.lab import Exam, Lab, passed
from headrace.tasks.packages.sdist import recorded, sealed
from headrace.vmhost.node.host import Host

pytestmark = pytest.mark.anyio

CODE = """
import datetime, os, random, time

def twice(x): return 2 * x
def order(words): return list(set(words))
def today(): return datetime.date.today().isoformat()
def year(): return time.strftime("%Y")
def draw(): return random.random()
"""
TESTS = """
from app.code import *
from app.code import datetime, os, random, time
WORDS = "a bb ccc dddd eeeee ffffff ggggggg hhhhhhhh".split()

def test_values():
    for x in (1, 2.5, "z", [None, (1, {2: b"3"})]):
        assert twice(1) == 1 + 1
    assert twice([1]) == [1] + [1]
    assert 10 == twice(5)
    assert twice("") == str()
    assert set(order("ab")) == set("ab")

def test_hash():
    assert order(WORDS) == list(set(WORDS))

def test_clock():
    assert today() == datetime.date.today().isoformat()
    assert year() == str(datetime.datetime.now().year)
    assert year() == str(time.localtime().tm_year)

def test_random():
    x = draw()
    assert twice(x) == x + x

def test_process():
    assert twice(os.getpid()) == os.getpid() * 2

def test_big():
    assert twice("x" * 40000) == "x" * 80000 + str()
"""


SOURCE_READERS = """
import inspect, pytest
from app.code import *

class TestReader:
    @pytest.mark.parametrize("n", [3])
    def test_own(self, n):
        assert twice(n) == 6
        assert inspect.getsource(type(self)).count("twice(n) == 6") > 1

def test_plain():
    assert twice(3) == 6
"""
LOUD = """
from app.code import *

def test_loud():
    assert twice("x" * 600000) == "x" * 1200000
    for n in range(3000):
        assert twice(n) == n + n

def test_after():
    assert twice(3) == 6
"""


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[Lab]:
    host = await Host.open(Environment(backend="process", max_vms=8))
    yield Lab(host, "recording", "light")
    await host.close()


def package_of(folder: Path, tests: str) -> Package:
    for path, text in (("app/__init__.py", ""), ("app/code.py", CODE), ("tests/test_code.py", tests)):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return read(folder, "app-1")


@pytest.mark.slow
async def test_a_comparison_that_leaves_no_room_for_others_stays_an_assertion(lab: Lab, tmp_path: Path) -> None:
    package = package_of(tmp_path, LOUD)
    plan, said = TestPlan(kind="pytest", paths=package.tests, timeout_s=120.0), list[str]()
    names = ("tests/test_code.py::test_after", "tests/test_code.py::test_loud")
    exam = await sealed(lab, package, Exam(plan=plan, expected=names), said.append)
    text = exam.sealed["tests/test_code.py"].decode()
    assert 'assert twice("x" * 600000)' in text and "__observe__(1, " in text and "__observe__(2, " in text
    assert exam.answers[names[0]] == ((2, "6"),) and len(exam.answers[names[1]]) == 3000
    assert exam.answers[names[1]][-1] == (1, "5998")
    assert said == [
        "2 of 3 assertions are sealed: their answers stay with the judge",
        "1 of 1 comparisons of two computed values have those of the untouched code as their answer",
    ]


async def test_a_test_that_fails_with_sealed_comparisons_keeps_them_and_the_others_are_sealed(
    lab: Lab, tmp_path: Path
) -> None:
    """One such test left the whole package unsealed."""
    package = package_of(tmp_path, SOURCE_READERS)
    plan, said = TestPlan(kind="pytest", paths=package.tests, timeout_s=120.0), list[str]()
    names = ("tests/test_code.py::TestReader::test_own[3]", "tests/test_code.py::test_plain")
    exam = await sealed(lab, package, Exam(plan=plan, expected=names), said.append)
    assert exam.answers == {names[1]: ((1, "6"),)}
    assert said == ["1 of 3 assertions are sealed: their answers stay with the judge"]


async def test_what_the_untouched_code_computes_is_recorded_where_it_is_always_the_same(
    lab: Lab, tmp_path: Path
) -> None:
    package = package_of(tmp_path, TESTS)
    plan = TestPlan(kind="pytest", paths=package.tests, timeout_s=120.0)
    seals = sealing.seal({path: package.files[path] for path in package.tests})
    said: list[str] = []
    result = await lab.run(package.files | seals.files, plan)
    exam = Exam(plan=plan, expected=passed(result), sealed=seals.files)
    assert len(exam.expected) == 6 and result.ok
    exam = await recorded(lab, package, exam, seals, result.tests, said.append)
    assert said == ["4 of 11 comparisons of two computed values have those of the untouched code as their answer"]
    texts = {name.partition("::")[2]: [text for _, text in answer] for name, answer in exam.answers.items()}
    (*sums, chain, ten, empty, letters) = texts.pop("test_values")
    assert (sums, chain, ten, empty) == (["2"] * 4, "[1, 1]", "10", "''") and letters in ("{'a', 'b'}", "{'b', 'a'}")
    assert texts == {
        "test_hash": [""],
        "test_clock": ["", "", ""],
        "test_random": [""],
        "test_process": [""],
        "test_big": [""],
    }
