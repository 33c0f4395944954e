"""Files that decide how hidden tests run come from the task; all others are the candidate's."""

from typing import Any

import msgspec
import pytest

from headrace.judging.candidates import image_changes, repository
from headrace.judging.hidden.setup import loads_itself
from headrace.messages.sandbox import Change, Snapshot
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from tests.judging.test_rules import acted

REF, PLAN = TaskRef("toy", "1"), TestPlan(kind="pytest", paths=("tests/unit/test_calc.py",))
FILES = {
    "calc.py": b"bug\n",
    "tests/helper.py": b"task\n",
    "tests/unit/conftest.py": b"task\n",
    "pyproject.toml": b"[project]\nname = 'a'\n[tool.pytest.ini_options]\naddopts = '-p plug -q'\n",
    "setup.cfg": b"[metadata]\nname = a\n[tool:pytest]\naddopts = -q\n",
    "plug.py": b"task\n",
}
TASK = Task(ref=REF, family="toy", prompt="", files=FILES, allowed=("**",), tests=PLAN)
ORACLE = Oracle(
    ref=REF,
    hidden={"tests/unit/test_calc.py": b"hidden\n"},
    tests=PLAN,
    expected=("tests/unit/test_calc.py::test_add",),
    solution={"calc.py": b"fix\n"},
    grading=Grading(kind="f2p_p2p"),
)
KEPT_OUT = [
    "conftest.py",
    "src/pkg/conftest.py",
    "tests/unit/conftest.py",
    "tests/helper.py",
    "tests/new_helper.py",
    "tests/__init__.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    "tox.ini",
    "plug.py",
    "sitecustomize.py",
    "lib/usercustomize/__init__.py",
    "a.pth",
    "evil.dist-info/entry_points.txt",
    "src/a.egg-info/entry_points.txt",
    "__pycache__/calc.cpython-311.pyc",
    ".venv/lib/python3.11/site-packages/_pytest/python.py",
    "_pytest/python.py",
    "src/pluggy.py",
    "unittest/case.py",
]
WORK = ["calc.py", "src/pkg/helper.py", "docs/tests.md", "src/pytest_like.py", "new_test.py", "app/testing_tools.py"]


@pytest.mark.parametrize("path", KEPT_OUT)
def test_set_up_does_not_reach_the_hidden_run(path: str) -> None:
    evil = {path: b"[pytest]\naddopts = -p zz\n", "calc.py": b"fix\n"}
    assert repository(TASK, ORACLE, evil, ()) == FILES | ORACLE.solution | ORACLE.hidden
    assert repository(TASK, ORACLE, {}, (path,)).get(path) == FILES.get(path), "nor can it be removed"


@pytest.mark.parametrize("path", WORK)
def test_work_reaches_it(path: str) -> None:
    assert repository(TASK, ORACLE, {path: b"new\n"}, ())[path] == b"new\n"


@pytest.mark.parametrize(
    ("path", "content", "reaches"),
    [
        ("pyproject.toml", FILES["pyproject.toml"].replace(b"'a'", b"'b'") + b"[tool.ruff]\n", True),
        ("pyproject.toml", FILES["pyproject.toml"].replace(b"-q", b"-q -p zz"), False),
        ("pyproject.toml", b"[project]\nname = 'b'\n", False),
        ("pyproject.toml", FILES["pyproject.toml"] + b"[tool.'pytest'.'ini_options2']\n", False),
        ("setup.cfg", FILES["setup.cfg"].replace(b"name = a", b"name = b\nversion = 2"), True),
        ("setup.cfg", FILES["setup.cfg"].replace(b"-q", b"-p zz"), False),
        ("setup.cfg", FILES["setup.cfg"].replace(b"-q", b"-q\x0b[tool:pytest2]"), False),
        ("tox.ini", b"[tox]\nenvlist = py311\n", True),
        ("tox.ini", b"[tox]\n[pytest]\naddopts = -p zz\n", False),
    ],
)
def test_a_file_of_which_pytest_reads_a_part_is_the_candidates_where_that_part_is_the_same(
    path: str, content: bytes, reaches: bool
) -> None:
    made = repository(TASK, ORACLE, {path: content}, ()).get(path)
    assert made == (content if reaches else FILES.get(path))


def test_an_image_keeps_its_own_set_up() -> None:
    image = msgspec.structs.replace(TASK, image="sha256:1", files={})
    paths = [*KEPT_OUT, "tests", "pyproject.toml", *WORK]
    changes = [Change(path, "gone" if path == "tests" else "file", 0o644) for path in paths]
    files = {change.path: b"[tool.pytest.ini_options]\n" for change in changes if change.kind == "file"}
    claim: Any = msgspec.structs.replace(acted("true"), changes=tuple(changes), diff=files)
    kept = {change.path for change in image_changes(image, ORACLE, claim).changes}
    # The host does not see the image's own options, so plug.py is a file like others here.
    assert kept == {*WORK, "plug.py"}
    linked = (Change("conftest.py", "link", 0o777, "evil.py"), Change("tox.ini", "link", 0o777, "evil.ini"))
    assert image_changes(image, ORACLE, msgspec.structs.replace(claim, changes=linked, diff={})).changes == ()
    known = msgspec.structs.replace(
        claim, originals={"_pytest/python.py": b"", "pyproject.toml": FILES["pyproject.toml"]}
    )
    assert "_pytest/python.py" in {change.path for change in image_changes(image, ORACLE, known).changes}


def test_what_the_known_solution_changes_is_the_candidates_and_a_risk() -> None:
    assert loads_itself(TASK, ORACLE, Snapshot(diff=ORACLE.solution), {}) == ""
    for path in ("conftest.py", "plug.py", "src/_pytest/python.py"):
        solved = msgspec.structs.replace(ORACLE, solution={path: b"fix\n"})
        assert repository(TASK, solved, {path: b"mine\n"}, ())[path] == b"mine\n"
        assert loads_itself(TASK, solved, Snapshot(diff=solved.solution), {}).startswith(
            f"the known solution changes {path}"
        )
    plugin = msgspec.structs.replace(TASK, files={"setup.cfg": b"[options.entry_points]\npytest11 =\n    a = a\n"})
    assert "a plugin of pytest" in loads_itself(plugin, ORACLE, Snapshot(diff={}), {})
    assert "a plugin of pytest" in loads_itself(TASK, ORACLE, Snapshot(diff={}), {"setup.py": b"pytest11"})
