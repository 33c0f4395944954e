"""Which values of the untouched code become answers: those that come out the same wherever and whenever it runs."""

from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.tasks import TestPlan
from headrace.tasks import sealing
from headrace.tasks.packages import read
from headrace.tasks.sdist import Exam, Lab, passed, recorded
from headrace.vmhost.host import Host

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


async def test_what_the_untouched_code_computes_is_recorded_where_it_is_always_the_same(tmp_path: Path) -> None:
    for path, text in (("app/__init__.py", ""), ("app/code.py", CODE), ("tests/test_code.py", TESTS)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    package = read(tmp_path, "app-1")
    plan = TestPlan(kind="pytest", paths=package.tests, timeout_s=120.0)
    seals = sealing.seal({path: package.files[path] for path in package.tests})
    host = await Host.open(Environment(backend="process", max_vms=8))
    said: list[str] = []
    try:
        lab = Lab(host.acquire, host.release, "recording", "light")
        result = await lab.run(package.files | seals.files, plan)
        exam = Exam(plan=plan, expected=passed(result), sealed=seals.files)
        assert len(exam.expected) == 6 and result.ok
        exam = await recorded(lab, package, exam, seals, result.tests, said.append)
    finally:
        await host.close()
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
