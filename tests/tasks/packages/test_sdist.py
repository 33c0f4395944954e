"""From a source tree to a suite that scripted policies play as they should, in real sandboxes."""

import random
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.harness.loop import run_episode
from headrace.harness.scripted import NAMES, ScriptedEngine, script
from headrace.messages.rollout import Limits, RolloutRequest
from headrace.messages.sandbox import Acquire, PullTree, Role, RunTests
from headrace.messages.tasks import Oracle, Task
from headrace.rendering import schemas
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.making.journal import NoTask
from headrace.tasks.packages import attempts, sdist
from headrace.tasks.packages.attempts import choose, thin
from headrace.tasks.packages.fetch import Package, PackageError, fetch, read, unpack
from headrace.tasks.packages.lab import Lab, SuiteError
from headrace.vmhost.node.host import Host
from tests.support.folder_suites import write_suite
from tests.support.records import of

pytestmark = pytest.mark.anyio

FILES = {
    "src/shapes/__init__.py": "from shapes.area import rectangle, ring\n",
    "src/shapes/area.py": '''"""Areas."""


def rectangle(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height


def ring(outer, inner):
    return rectangle(outer, outer) - rectangle(inner, inner)
''',
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef unit():\n    return 1\n",
    "tests/test_area.py": """import os
import sys

import pytest

from shapes import rectangle, ring


@pytest.mark.parametrize("width", [1, 2])
def test_rectangle(width, unit):
    assert rectangle(width, 3) == 3 * width * unit


def test_negative():
    with pytest.raises(ValueError):
        rectangle(-1, 2)


class TestRing:
    def test_ring(self):
        assert ring(3, 1) == 8

    def test_no_hole(self):
        assert ring(3, 0) == 9


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere")
def test_windows():
    assert False


@pytest.mark.parametrize("key", [os.urandom(4).hex()])
def test_named_otherwise_in_every_run(key):
    assert len(key) == 8
""",
    "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n",
    "docs/conf.py": "x = 1\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


def test_a_package_is_split_into_code_and_tests(tree: Path) -> None:
    package = read(tree, "shapes-1.0")
    assert package.sources == ("src/shapes/__init__.py", "src/shapes/area.py")
    assert package.tests == ("tests/test_area.py",) and package.support == ("tests/conftest.py",)
    assert not {"setup.cfg", "docs/conf.py"} & set(package.files)


def test_a_package_without_tests_or_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    with pytest.raises(PackageError, match="no test files"):
        read(tmp_path, "x")
    (tmp_path / "module.py").rename(tmp_path / "test_module.py")
    with pytest.raises(PackageError, match="no Python modules"):
        read(tmp_path, "x")


def test_an_archive_may_not_leave_its_folder(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "good.tar.gz", "w:gz") as packed:
        packed.add(tree, "shapes-1.0")
    assert read(unpack(tmp_path / "good.tar.gz", tmp_path / "good"), "shapes").tests == ("tests/test_area.py",)
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as packed:
        packed.add(tree / "setup.cfg", "../../evil.cfg")
    with pytest.raises(PackageError, match="cannot be unpacked"):
        unpack(tmp_path / "evil.tar.gz", tmp_path / "evil")
    assert not (tmp_path.parent / "evil.cfg").exists()


def test_pip_that_fails_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="cannot be downloaded as a source distribution: ERROR"):
        fetch("not a requirement ==", tmp_path)


def test_visible_tests_are_a_part_with_a_symptom() -> None:
    names = [f"t.py::test_{n}[{p}]" for n in range(6) for p in "ab"]
    for seed in range(20):
        shown = choose(names, [names[0], names[1], names[2]], random.Random(seed))
        assert len({"t.py::test_0", "t.py::test_1"} & shown) == 1 and len(shown) == 3
    assert choose(names, names[:2], random.Random(0)) >= {"t.py::test_0"}


def test_thinning_keeps_what_is_used() -> None:
    source = FILES["tests/test_area.py"].encode()
    thinned = thin(source, {"test_negative"}).decode()
    space: dict[str, object] = {}
    exec(
        compile(
            thinned.replace("from shapes import", "from math import sqrt as rectangle, sqrt as ring #"), "t", "exec"
        ),
        space,
    )
    assert "test_negative" in space and "test_rectangle" not in space and "parametrize" not in thinned
    assert not [name for name in dir(space["TestRing"]) if name.startswith("test")]
    assert (
        thin(
            source,
            {
                "test_rectangle",
                "test_negative",
                "TestRing::test_ring",
                "TestRing::test_no_hole",
                "test_windows",
                "test_named_otherwise_in_every_run",
            },
        )
        == source
    )
    helped = b"def test_a():\n    pass\n\n\ndef test_b():\n    test_a()\n"
    assert thin(helped, {"test_b"}) == helped and thin(helped, {"test_a"}) == b"def test_a():\n    pass\n\n\n"


async def first(lab: Lab, package: Package, said: list[str]) -> tuple[Task, Oracle]:
    """The first task of a package's mutations."""
    package, exam = await sdist.examined(lab, package, said.append)
    for mutation in attempts.candidates(package, 1):
        with suppress(NoTask):
            return await attempts.attempt(lab, package, mutation, exam, package.name, 1)
    raise AssertionError("no mutation makes a task")


async def judged(host: Host, suite: str, id: str, root: Path, name: str, number: int) -> tuple[str, bool]:
    """An episode of a scripted policy and the judge's verdict on its diff."""
    opened = open_suite(suite, root)
    task, oracle = opened.task(id), opened.oracle(id)
    renderer = TerseRenderer(Tokenizer.train((), 256 + len(schemas.tags())))
    request = of(
        RolloutRequest,
        run="r1",
        lane="eval",
        group=f"e{number}",
        task=task.ref,
        limits=Limits(max_tokens=256, context_tokens=512),
    )

    def acquire(role: Role, files: dict[str, bytes]) -> Acquire:
        return of(Acquire, run="r1", lane="eval", role=role, group=f"e{number}", isolation="episode", files=files)

    sandbox = await host.acquire(acquire("rollout", task.files))
    episode = await run_episode(
        engine=ScriptedEngine(script(name, task, oracle), renderer),
        sandbox=sandbox,
        renderer=renderer,
        request=request,
        task=task,
    )
    after = (await sandbox.call(PullTree())).files
    host.release(sandbox.id)
    changes = {path: after[path] for path in task.allowed if after.get(path) != task.files[path]}
    judge = await host.acquire(acquire("judge", task.files | changes | oracle.hidden))
    result = await judge.call(RunTests(plan=oracle.tests))
    host.release(judge.id)
    names = sorted(test.name for test in result.tests)
    return episode.outcome, names == sorted(oracle.expected) and all(test.outcome == "passed" for test in result.tests)


async def test_a_suite_from_a_source_tree(tree: Path, host: Host, tmp_path: Path) -> None:
    said: list[str] = []
    lab = Lab(host, "shapes", "debian")
    package = await sdist.source_tree(str(tree), "shapes-1.0")
    suite = write_suite("shapes-1.0", tmp_path / "shapes-1.0", [await first(lab, package, said)], str(tree))
    assert "tests of shapes-1.0 do not pass here every time and are left out" in said[0]
    opened = open_suite("shapes-1.0", tmp_path)
    assert list(opened.ids()) == list(suite.ids()) and len(opened.ids()) == 1
    for id in opened.ids():
        task, oracle = opened.task(id), opened.oracle(id)
        assert task.ref == oracle.ref and task.ref.suite == "shapes-1.0" and task.family == "mutation:shapes"
        assert len(oracle.expected) == 5 and not any("windows" in name for name in oracle.expected)
        (path,) = oracle.solution
        assert task.files[path] != oracle.solution[path] == FILES[path].encode()
        assert (
            task.files["tests/test_area.py"]
            != oracle.hidden["tests/test_area.py"]
            == FILES["tests/test_area.py"].encode()
        )
        assert set(oracle.hidden) == {"tests/test_area.py", "tests/conftest.py"} and task.template == "debian"
        assert task.allowed == ("src/shapes/__init__.py", "src/shapes/area.py") and len(task.prompt) <= 300
        assert path not in task.prompt
    for number, name in enumerate(NAMES):
        outcome, ok = await judged(host, "shapes-1.0", opened.ids()[0], tmp_path, name, number)
        assert outcome in ("finished", "max_tokens") and ok is (name == "oracle")
    with pytest.raises(UnknownSuite, match="has no task"):
        opened.task("nothing")
    with pytest.raises(UnknownSuite, match="there is no suite"):
        open_suite("other", tmp_path)
    for bad in ("../x", "/etc", ""):
        with pytest.raises(UnknownSuite, match="not the name"):
            open_suite(bad, tmp_path)


async def test_tests_that_never_pass_make_no_suite(tmp_path: Path, host: Host) -> None:
    (tmp_path / "thing.py").write_text("def f():\n    return 1\n")
    (tmp_path / "test_thing.py").write_text("import not_there\n\n\ndef test_f():\n    pass\n")
    with pytest.raises(SuiteError, match=r"no test of thing passes in a sandbox: .*not_there"):
        await sdist.examined(Lab(host, "t", "debian"), read(tmp_path, "thing"), print)


def test_a_full_host_has_time_for_a_suite() -> None:
    assert (sdist.limit(0.5), sdist.limit(10.0)) == (60.0, 200.0)


async def test_an_error_before_the_collection_is_in_the_sentence(tmp_path: Path, host: Host) -> None:
    (tmp_path / "thing.py").write_text("def f():\n    return 1\n")
    (tmp_path / "conftest.py").write_text("import plugin_that_is_missing\n")
    (tmp_path / "test_thing.py").write_text("def test_f():\n    pass\n")
    with pytest.raises(SuiteError, match="ModuleNotFoundError: No module named 'plugin_that_is_missing'"):
        await sdist.examined(Lab(host, "t", "debian"), read(tmp_path, "thing"), print)
