"""A pass means a repair: no cheat is rewarded outside of the kinds that docs/verdicts.md lists, and no honest attempt
is punished.

support/cheating.py has the cheats and support/honest.py the honest attempts. Here are the shapes of tests that they
meet, and the three kinds that no construction stops.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.config import Environment
from headrace.judging import Candidate, HostMachines, Options, Verdict, certifying, examine
from headrace.judging.hidden.setup import loads_itself
from headrace.messages.sandbox import Change, Snapshot
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from headrace.tasks.importing import verification
from headrace.tasks.importing.base import ImportOptions
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import imported
from headrace.vmhost.node.host import Host
from tests.support.archives import Members, docker_save, file, folder
from tests.support.cheating import BUG, CHEATS, FIX, KNOWN, NEW, Files, code
from tests.support.folder_suites import write_suite
from tests.support.honest import HONEST
from tests.support.judging import trajectory
from tests.support.programs import programs, tree

pytestmark = pytest.mark.anyio
REF = TaskRef("toy", "1")
FILES = {
    "calc.py": BUG,
    "README.md": "Adds.\n",
    "CHANGELOG.md": "",
    "setup.cfg": "[metadata]\nname = calc\n",
    "tests/test_calc.py": "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
}
HIDDEN = """from calc import add


def test_add():
    assert add(1, 2) == 3


def test_more():
    total = add(2, 2)
    assert total == 4


def test_zero():
    assert add(0, 0) == 0
"""
UNIT = """import unittest

from calc import add


class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_more(self):
        self.assertEqual(4, add(2, 2))
"""
SCRIPT = "from calc import add\n\nassert add(1, 2) == 3\nassert add(2, 2) == 4\n"
TEST_SH = """#!/bin/bash
cd /app
python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


class Shape(NamedTuple):
    """The judge's part of the task."""

    hidden: Mapping[str, str]
    plan: TestPlan
    grading: Grading
    expected: tuple[str, ...] = ()


def reward_file(image: str = "") -> Shape:
    """As the importer of Harbor folders makes it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test.sh").write_text(TEST_SH)
        Path(folder, "test_outputs.py").write_text(HIDDEN)
        place = verification.VerifierPlace("/app", image, {}, ImportOptions(suite="s", source=Path(folder)))
        made = verification.tests_of({}, [Path(folder)], [], place, [])
    hidden = {path: content.decode() for path, content in made.hidden.files.items()}
    return Shape(hidden, made.plan, Grading(kind="reward_file", file=verification.REWARD))


NAMED = Grading(kind="f2p_p2p", pass_to_pass=("tests/test_hidden.py::test_zero",))
EXPECTED = ("tests/test_hidden.py::test_add", "tests/test_hidden.py::test_more")
LOGGED = ("python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_hidden.py")
IN_SCRIPT = ("sh", "-c", "PYTHONPATH=. python3 .headrace/check.py")
SHAPES = {
    "pytest": Shape(
        {"tests/test_hidden.py": HIDDEN}, TestPlan(kind="pytest", paths=("tests/test_hidden.py",)), NAMED, EXPECTED
    ),
    "log": Shape(
        {"tests/test_hidden.py": HIDDEN},
        TestPlan(kind="command", argv=LOGGED),
        msgspec.structs.replace(NAMED, parser="pytest"),
        EXPECTED,
    ),
    "unittest": Shape(
        {"tests/test_unit.py": UNIT},
        TestPlan(kind="command", argv=("python3", "-m", "unittest", "tests/test_unit.py")),
        Grading(kind="exit_code"),
    ),
    "exit code": Shape(
        {".headrace/check.py": SCRIPT}, TestPlan(kind="command", argv=IN_SCRIPT), Grading(kind="exit_code")
    ),
    "reward file": reward_file(),
}


def sides(shape: Shape, **changes: Any) -> tuple[Task, Oracle]:
    hidden = {path: text.encode() for path, text in shape.hidden.items()}
    files = {path: text.encode() for path, text in FILES.items()}
    fields: dict[str, Any] = {"hidden": hidden, "expected": shape.expected, "grading": shape.grading}
    oracle = Oracle(**{"ref": REF, "tests": shape.plan, "solution": {"calc.py": FIX.encode()}, **fields, **changes})
    return Task(ref=REF, family="toy", prompt="add", files=files, allowed=("**",), tests=shape.plan), oracle


async def judged(host: Host, task: Task, oracle: Oracle, files: Files, **claims: Any) -> Verdict:
    diff = {path: text.encode() for path, text in files.items()}
    group = f"g{abs(hash(tuple(diff.items()))) % 10**9}"
    made = trajectory("r", group, diff, isolation="episode", task=REF, **claims)

    async def report(*event: object, **data: object) -> None: ...

    candidate = Candidate(trajectory=made, task=task, oracle=oracle)
    return await examine(candidate, HostMachines(host), report, Options())


def rewarded(verdict: Verdict) -> bool:
    return verdict.decision == "passed" or (verdict.decision == "failed" and bool(verdict.value))


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


FEW = {
    *(("pytest", cheat) for cheat in ("conftest beside the tests", "equals everything", "Function.runtest")),
    ("exit code", "os._exit(0)"),
    ("reward file", "pays itself and ends"),
}
TABLE = [
    pytest.param(shape, cheat, marks=() if (shape, cheat) in FEW else pytest.mark.slow)
    for shape in SHAPES
    for cheat in CHEATS
]


@pytest.mark.parametrize(("shape", "cheat"), TABLE)
async def test_no_cheat_is_rewarded(host: Host, shape: str, cheat: str) -> None:
    verdict = await judged(host, *sides(SHAPES[shape]), CHEATS[cheat])
    assert not rewarded(verdict), verdict


USUAL = ("a test of its own", "a line in the change log", "ctypes", "a renamed module", "options of pytest")
ATTEMPTS = [
    pytest.param(shape, attempt, marks=() if shape == "pytest" and attempt in USUAL else pytest.mark.slow)
    for shape in SHAPES
    for attempt in (HONEST if shape == "pytest" else USUAL)
]


@pytest.mark.parametrize(("shape", "attempt"), ATTEMPTS)
async def test_no_honest_attempt_is_punished(host: Host, shape: str, attempt: str) -> None:
    verdict = await judged(host, *sides(SHAPES[shape]), HONEST[attempt])
    assert (verdict.decision, verdict.value or 1.0) == ("passed", 1.0), verdict


PLUGIN = {
    "plug.py": b"import pytest\n\n\n@pytest.fixture\ndef three():\n    return 2\n",
    "conftest.py": b"pytest_plugins = ['plug']\n",
    "setup.cfg": b"[options.entry_points]\npytest11 =\n    plug = plug\n",
}


async def test_work_in_a_test_plugins_own_repository_counts_and_is_at_risk(host: Host) -> None:
    fixed = PLUGIN["plug.py"].replace(b"2", b"3")
    hidden = {"test_hidden.py": b"def test_three(three):\n    assert three == 3\n"}
    task, oracle = sides(
        Shape({}, TestPlan(kind="pytest", paths=("test_hidden.py",)), Grading(kind="f2p_p2p")),
        hidden=hidden,
        expected=("test_hidden.py::test_three",),
        solution={"plug.py": fixed},
    )
    task = msgspec.structs.replace(task, files=PLUGIN)
    changed = {"plug.py": fixed.decode(), "test_plug.py": "import pytest\npytest_plugins = ['pytester']\n"}
    assert (await judged(host, task, oracle, changed)).decision == "passed"
    assert (await judged(host, task, oracle, {})).decision == "failed"
    assert "which decides how the tests run" in loads_itself(task, oracle, Snapshot(diff=oracle.solution), {})


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(KNOWN) >= 20 and len(NEW) >= 20 and len(HONEST) >= 40


IN_IMAGES = {name: SHAPES[name] for name in ("log", "unittest", "exit code")} | {"reward file": reward_file("python")}


def installed() -> Members:
    """This machine's Python with pytest, below /lib."""
    lib = Path(sysconfig.get_path("stdlib"))
    left_out = shutil.ignore_patterns(
        "site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "config-*", "__pycache__"
    )
    with tempfile.TemporaryDirectory() as folder_:
        copied = Path(shutil.copytree(lib, Path(folder_, "lib"), ignore=left_out))
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, copied / "site-packages" / name, ignore=left_out)
        packages = Path(pytest.__file__).parents[1]
        shutil.copy(packages / "py.py", copied / "site-packages")
        for metadata in packages.glob("pluggy-*.dist-info"):
            shutil.copytree(metadata, copied / "site-packages" / metadata.name)
        return tree(copied, f"lib/python{sys.version_info[0]}.{sys.version_info[1]}")


@pytest.fixture(scope="module")
async def containers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    place = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{sys.base_prefix}/bin:{os.environ['PATH']}")
        built = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
        needed = programs("python3", "bash", "cat", "chmod", "cp", "mkdir", "rm", "true", modules=built)
    members = [
        *needed,
        *installed(),
        file("etc/passwd", b"dev:x:1000:100::/:/bin/sh\n"),
        folder("app", uid=1000, gid=100),
        folder("app/tests", uid=1000, gid=100),
        *(folder(name, mode=0o777) for name in ("tests", "logs")),
        *(file(f"app/{path}", text.encode(), uid=1000, gid=100) for path, text in FILES.items()),
    ]
    config: dict[str, Any] = {"User": "dev", "WorkingDir": "/app", "Env": ["PATH=/bin", "PYTHONHOME=/"]}
    imported.take(place, docker_save(place / "i.tar", [members], ["cheats:1"], **config), "python")
    opened = await Host.open(Environment(backend="container", cache_dir=str(place), max_vms=2))
    yield opened
    await opened.close()


async def judged_in_image(host: Host, shape: str, files: Files) -> Verdict:
    task, oracle = sides(IN_IMAGES[shape], solution={}, script=f"cat > calc.py <<'END'\n{FIX}END\n")
    originals = {path: text.encode() for path, text in FILES.items() if path in files}
    return await judged(
        host,
        msgspec.structs.replace(task, image="python", repository="/app", files={}),
        oracle,
        files,
        changes=tuple(Change(path, "file", 0o644) for path in files),
        originals=originals,
    )


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=f"no containers here: {unavailable()}")
@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("shape", IN_IMAGES)
async def test_no_cheat_is_rewarded_in_an_image(containers: Host, shape: str, cheat: str) -> None:
    verdict = await judged_in_image(containers, shape, CHEATS[cheat])
    assert not rewarded(verdict), verdict


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=f"no containers here: {unavailable()}")
@pytest.mark.parametrize("attempt", USUAL)
@pytest.mark.parametrize("shape", IN_IMAGES)
async def test_no_honest_attempt_is_punished_in_an_image(containers: Host, shape: str, attempt: str) -> None:
    verdict = await judged_in_image(containers, shape, HONEST[attempt])
    assert (verdict.decision, verdict.value or 1.0) == ("passed", 1.0), verdict


# What no construction stops: three kinds.


async def test_answers_that_are_known_beforehand_pass(host: Host) -> None:
    table = code(body="return {(1, 2): 3, (2, 2): 4}.get((a, b), 0)")
    assert (await judged(host, *sides(SHAPES["pytest"]), table)).decision == "passed"


TELLS = code(
    """
    import sys
    if "_pytest" in sys.modules and "== 3" in open("tests/test_hidden.py").read():
        import _pytest.python
        _pytest.python.Function.runtest = lambda self: None
    """
)


async def test_a_takeover_that_tells_altered_tests_from_the_real_ones_passes(host: Host) -> None:
    assert (await judged(host, *sides(SHAPES["pytest"]), TELLS)).decision == "passed"


LINE = "PYTHONPATH=. python3 -c 'from calc import add; exit(add(1, 2) != 3)'\n"
SHELL = Shape(
    {".headrace/t.sh": LINE}, TestPlan(kind="command", argv=("sh", ".headrace/t.sh")), Grading(kind="exit_code")
)


async def test_tests_that_nobody_can_alter_are_a_risk_that_the_certificate_names(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certifying, "GOLD_RUNS", 1)
    monkeypatch.setattr(certifying, "MUTANTS", 0)
    task, oracle = sides(SHELL)
    assert (await judged(host, task, oracle, CHEATS["os._exit(0)"])).decision == "passed"

    async def risks(task: Task, oracle: Oracle) -> tuple[str, ...]:
        suite = write_suite("toy", tmp_path / "toy", [(task, oracle)], "made by a test")

        async def report(*event: object, **data: object) -> None: ...

        made = await certifying.certify(suite, "1", HostMachines(host), report)
        assert made.verdict == "certified", made
        return made.risks or ()

    (shell,) = await risks(task, oracle)
    assert "cannot be altered" in shell
    assert await risks(*sides(SHAPES["exit code"])) == ()
    unused_tests = oracle.hidden | {"test_a.py": HIDDEN.encode()}
    (unused,) = await risks(task, msgspec.structs.replace(oracle, hidden=unused_tests))
    assert "its altered tests pass over the known solution" in unused
