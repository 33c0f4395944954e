"""Certifying: the order of test runs, solutions that are programs, solutions in images, and leaks."""

import json
import subprocess
from collections.abc import AsyncIterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.config import Environment
from headrace.judging import HostMachines, certifying
from headrace.judging.machines import Named
from headrace.messages.sandbox import Acquire, Op, OpResult, RunTests
from headrace.messages.tasks import Grading, Oracle, SandboxLimits, Steps, Task, TaskRef, TestPlan
from headrace.tasks import Suite, certificates, open_suite
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import imported
from headrace.vmhost.node.host import Host
from tests.support.archives import docker_save, file, folder
from tests.support.folder_suites import write_suite
from tests.support.playing import report
from tests.support.programs import programs, tree
from tests.support.records import of
from tests.tasks.importing import test_stepwise

pytestmark = pytest.mark.anyio

RIGHT = b"def larger(a, b):\n    return a if a > b else b\n\n\ndef one():\n    return 1\n"
TESTS = (
    b"from code_ import larger, one\n\n\ndef test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"
    b"\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_type():\n    assert type(one()) is int\n"
)
NAMES = ("test_code.py::test_larger", "test_code.py::test_one", "test_code.py::test_type")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=2))
    yield opened
    await opened.close()


class Recording(HostMachines):
    """The host, and the plans of the test runs."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.plans: list[tuple[str, ...]] = []

    async def acquire(self, request: Acquire) -> Named:
        """A fresh sandbox whose calls are recorded."""
        sandbox = await super().acquire(request)
        ordinary, plans = sandbox.call, self.plans

        async def call(op: Op, call_id: str = "") -> OpResult:
            if isinstance(op, RunTests):
                plans.append(op.plan.paths)
            return await ordinary(op, call_id)

        sandbox.call = call  # type: ignore[method-assign]
        return sandbox


async def test_tests_that_notice_the_bug_run_first(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certifying, "GOLD_RUNS", 1)
    monkeypatch.setattr(certifying, "MUTANTS", 2)
    ref, plan = TaskRef("s", "1"), TestPlan(kind="pytest", paths=("test_code.py",), timeout_s=60.0)
    task = of(Task, ref=ref, files={"code_.py": RIGHT.replace(b"a > b", b"a < b")}, allowed=("code_.py",), tests=plan)
    oracle = Oracle(ref=ref, hidden={"test_code.py": TESTS}, tests=plan, expected=NAMES, solution={"code_.py": RIGHT})
    suite = write_suite("s", tmp_path / "s", [(task, oracle)], "made by a test")
    machines = Recording(host)
    made = await certifying.certify(suite, "1", machines, report)
    assert (made.gold_passed, made.noop, made.stub, made.mutants) == (1, "failed", "failed", 2)
    whole, few = plan.paths, NAMES[:1]
    # The known solution, no change, the known solution with the few, empty functions; then the two broken solutions, of
    # which `a >= b` is no bug: it passes the few, and all tests run. Code that passes runs with altered tests as well.
    assert machines.plans[:6] == [whole, NAMES, whole, few, few, few]
    assert sorted(machines.plans[6:]) == sorted([few, few, few, whole, NAMES])
    assert made.survivors == ("code_.py:2: > -> >=",)


BUG = RIGHT.replace(b"a > b", b"a < b")
REPAIR = "sed -i 's/a < b/a > b/' code_.py"


def functions(folder: Path, script: str, tests: bytes = TESTS, **changes: Any) -> Suite:
    """A suite of one task whose solution is a program; its tests run in some ms."""
    ref, plan = TaskRef("s", "1"), TestPlan(kind="functions", paths=("test_code.py",))
    files = {"code_.py": BUG, "other.py": b""}
    fields: dict[str, Any] = {"prompt": "Find the bug.", "files": files, "allowed": ("code_.py",)}
    task = Task(ref=ref, family="f", tests=plan, **fields | changes)
    oracle = Oracle(ref=ref, hidden={"test_code.py": tests}, tests=plan, expected=NAMES, solution={}, script=script)
    return write_suite("s", folder / "s", [(task, oracle)], "made by a test")


async def test_a_solution_that_is_a_program_is_made_and_examined(host: Host, tmp_path: Path) -> None:
    program = "#!/usr/bin/env python3\nfrom pathlib import Path\n"  # no shell reads it: its first line says what does
    program += "code = Path('code_.py')\ncode.write_text(code.read_text().replace('a < b', 'a > b'))\n"
    suite = functions(tmp_path, program)
    made = await certifying.certify(suite, "1", HostMachines(host), report)
    assert (made.verdict, made.gold_passed, made.noop, made.stub) == ("certified", 5, "failed", "failed"), made
    assert made.mutants and made.killed >= made.mutants - 1 and not made.leaks
    assert host.usage()["sandboxes"] == 0
    certificates.write(suite, [made], tmp_path / "certificates")
    assert certificates.refusal(suite, tmp_path, False) == ""


COUNTED = b"""

def test_type():
    with open("%s", "a+") as runs:
        runs.write("x")
        runs.seek(0)
        assert len(runs.read()) %% 5
"""


@pytest.mark.parametrize(
    ("script", "tests", "changes", "why"),
    [
        ("echo not today >&2; exit 3", TESTS, {}, "the solution's program ends with code 3: not today"),
        ("true", TESTS, {}, "the known solution changes nothing"),
        ("echo 1 > other.py", TESTS, {}, "changes no path that the task allows, but other.py"),
        ("sleep 60", TESTS, {"limits": SandboxLimits(time_s=0.2)}, "the solution's program does not end within 0.2 s"),
        ("kill -9 $PPID; sleep 60", TESTS, {}, "2 sandboxes ended while the known solution was made"),
        (
            "echo '#' >> code_.py",
            TESTS,
            {},
            "the known solution passes 0 of 5 times: test_code.py::test_larger does not pass",
        ),
        (REPAIR, COUNTED, {}, "flaky: the known solution passes 4 of 5 times"),
        (
            REPAIR,
            b"def test_larger(): pass\ntest_one = test_type = test_larger\n",
            {},
            "the untouched repository passes",
        ),
    ],
)
async def test_a_program_whose_tests_say_nothing_about_it_is_refused(
    host: Host, tmp_path: Path, script: str, tests: bytes, changes: dict[str, Any], why: str
) -> None:
    if tests is COUNTED:
        tests = TESTS[: TESTS.index(b"\n\ndef test_type")] + COUNTED % str(tmp_path / "runs").encode()
    suite = functions(tmp_path, script, tests, **changes)
    made = await certifying.certify(suite, "1", HostMachines(host), report)
    assert made.verdict == "refused" and any(why in reason for reason in made.reasons), made
    assert host.usage()["sandboxes"] == 0


def test_an_examination_that_ended_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certifying, "GOLD_RUNS", 1)
    monkeypatch.setattr(certifying, "MUTANTS", 0)
    suite = functions(tmp_path, "sed -i 's/a < b/a > b/' code_.py\n")
    settings = ["--set", f"tasks.dir={json.dumps(str(tmp_path))}", "--set", 'environment.backend="process"']
    assert main(["tasks", "certify", suite.name, *settings]) == 0
    (made,) = (certificates.read(suite.name, tmp_path) or pytest.fail("no file")).certificates
    folder = tmp_path / "certificates"
    certificates.append(suite.name, msgspec.structs.replace(made, notes=("from the first time",)), folder)
    certificates.append(suite.name, msgspec.structs.replace(made, judge_version="other", task_hash="0"), folder)
    (part,) = folder.glob("*.part")
    with part.open("ab") as cut:
        cut.write(b'\n{"task":')
    certificates.append(suite.name, msgspec.structs.replace(made, task_hash="1"), folder)
    assert certificates.begun(suite.name, folder).keys() == {made.task_hash, "0", "1"}
    assert main(["tasks", "certify", suite.name, *settings]) == 0
    (again,) = (certificates.read(suite.name, tmp_path) or pytest.fail("no file")).certificates
    assert again.notes == ("from the first time",) and not part.exists()


async def test_the_solutions_of_a_tasks_steps_are_made_one_after_the_other(host: Host, tmp_path: Path) -> None:
    test_stepwise.folder(tmp_path / "tasks" / "t")
    assert not test_stepwise.made(tmp_path, "light").refused
    machines = HostMachines(host)
    made = await certifying.certify(open_suite("s", tmp_path), "t", machines, report)
    assert (made.verdict, made.gold_passed, made.noop) == ("certified", 5, "failed"), made
    oracle = open_suite("s", tmp_path).oracle("t")
    task, (first, second) = open_suite("s", tmp_path).task("t"), test_stepwise.of_steps(oracle)
    for script, verdict, reason in (
        ("true\n", "refused", "the known solution passes 0 of 5 times"),
        ("", "uncertifiable", "there is no known solution of the step second"),
    ):
        last = msgspec.structs.replace(second, script=script)
        steps = Steps(tests=(first, last))
        suite = write_suite(
            f"s{verdict}", tmp_path / verdict, [(task, msgspec.structs.replace(oracle, steps=steps))], "x"
        )
        made = await certifying.certify(suite, "t", machines, report)
        assert made.verdict == verdict and made.reasons[0].startswith(reason), made.reasons


async def test_a_certificate_says_that_no_broken_solution_was_tried(host: Host, tmp_path: Path) -> None:
    ref, plan = TaskRef("s", "1"), TestPlan(kind="command", argv=("sh", "-c", "test -s answer"))
    task = Task(ref=ref, family="f", prompt="Write it.", files={"a": b"b"}, allowed=("**",), tests=plan)
    oracle = of(Oracle, ref=ref, tests=plan, script="echo 42 > answer", grading=Grading(kind="exit_code"))
    suite = write_suite("s", tmp_path / "s", [(task, oracle)], "made by a test")
    made = await certifying.certify(suite, "1", HostMachines(host), report)
    assert (made.verdict, made.mutants, made.notes) == ("certified", 0, (certifying.NO_MUTANTS,)), made


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one image of three repositories: with the commit of the task, with the next commit's objects as
    well, and with files that the agent must not see."""
    place = tmp_path_factory.mktemp("image")
    members = [
        *programs("git", "find", "sha256sum", "cat", "grep", "sed"),
        file("etc/passwd", b"dev:x:1000:100::/:/bin/sh\n"),
    ]
    for name in ("clean", "history", "copies"):
        repository = place / name
        repository.mkdir()
        git(repository, "init", "-q")
        (repository / "code_.py").write_bytes(BUG)
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "bug")
        if name == "history":
            (repository / "code_.py").write_bytes(RIGHT)
            git(repository, "commit", "-qam", "repair")
            git(repository, "reset", "-q", "--hard", "HEAD~1")
        if name == "copies":
            (repository / "old").mkdir()
            (repository / "old" / "code_.py").write_bytes(RIGHT)
            (repository / "check").write_bytes(CHECK)
        # The history belongs to root, as in many images; the files belong to the user of the agent.
        members += [folder(name, uid=1000, gid=100), *tree(repository / ".git", f"{name}/.git")]
        members += [file(f"{name}/code_.py", BUG, uid=1000, gid=100)]
        members += tree(repository / "old", f"{name}/old") if name == "copies" else []
        members += [file(f"{name}/check", CHECK, uid=1000, gid=100)] if name == "copies" else []
    saved = docker_save(place / "i.tar", [members], ["certified:1"], User="dev", WorkingDir="/clean")
    imported.take(place / "cache", saved, "certified")
    return place / "cache"


CHECK = b"""set -e
grep -q 'return a if a > b else b' code_.py
grep -q 'return 1' code_.py  # the log of this check stays empty
"""
LINES = unified_diff(BUG.decode().splitlines(True), RIGHT.decode().splitlines(True), "a/code_.py", "b/code_.py")
PATCH = f"cat > /tmp/patch <<'END'\n{''.join(LINES)}END\ngit apply /tmp/patch\n"


def in_image(folder: Path, repository: str, check: bytes = CHECK, **solution: Any) -> Suite:
    ref, plan = TaskRef("s", "1"), TestPlan(kind="command", argv=("sh", "check"), timeout_s=60.0)
    where: dict[str, Any] = {"image": "certified", "repository": repository}
    task = Task(ref=ref, family="f", prompt="Find the bug.", files={}, allowed=("**",), tests=plan, **where)
    fields: dict[str, Any] = {"solution": {}} | (solution or {"script": PATCH})
    grading = Grading(kind="exit_code")
    oracle = Oracle(ref=ref, hidden={"check": check}, tests=plan, expected=(), grading=grading, **fields)
    return write_suite("s", folder / "s", [(task, oracle)], "made by a test")


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.skipif(bool(unavailable()), reason=f"no containers here: {unavailable()}")
@pytest.mark.parametrize(
    ("repository", "changes", "verdict", "words"),
    [
        ("/clean", {}, "certified", ()),
        ("/clean", {"solution": {"code_.py": RIGHT}}, "certified", ()),
        ("/history", {}, "refused", ("the repository's history holds the solution of code_.py",)),
        ("/copies", {}, "refused", ("check is the hidden file check", "old/code_.py holds the solution of code_.py")),
        ("/clean", {"script": "exit 1"}, "refused", ("the solution's program ends with code 1",)),
        ("/clean", {"script": "echo '#' >> code_.py"}, "refused", ("the known solution passes 0 of 5 times",)),
        ("/clean", {"check": b"true\n"}, "refused", ("the untouched repository passes", "empty functions passes")),
    ],
)
async def test_a_solution_in_an_image_is_examined(
    images: Path, tmp_path: Path, repository: str, changes: dict[str, Any], verdict: str, words: tuple[str, ...]
) -> None:
    host = await Host.open(Environment(backend="container", cache_dir=str(images), max_vms=2))
    try:
        suite = in_image(tmp_path, repository, **changes)
        made = await certifying.certify(suite, "1", HostMachines(host), report, backend=host.backend)
        assert made.verdict == verdict and made.backend == "container", made
        assert all(any(word in reason for reason in made.reasons) for word in words), made
        if verdict == "certified":
            assert (made.gold_passed, made.noop, made.stub) == (5, "failed", "failed"), made
            assert made.mutants and made.killed == made.mutants and made.notes == made.leaks == ()
        else:
            assert len(made.reasons) == len(words), made
        assert host.usage()["sandboxes"] == 0
    finally:
        await host.close()


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.skipif(bool(unavailable()), reason=f"no containers here: {unavailable()}")
def test_a_suite_is_certified_where_its_images_are(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_image(tmp_path, "/clean")
    values = {"tasks.dir": tmp_path, "environment.backend": "container", "environment.cache_dir": tmp_path / "empty"}
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(str(value))}")]
    assert main(["tasks", "certify", "s", *settings]) == 1
    told = capsys.readouterr().out
    assert "the task cannot run here: the image certified is not stored on this machine; store it with" in told
    assert "headrace images" in told and "0 of 1 tasks are certified" in told
    settings += ["--set", f"environment.cache_dir={json.dumps(str(images))}"]
    assert main(["tasks", "certify", "s", *settings]) == 0
    assert "1 of 1 tasks are certified" in capsys.readouterr().out
    suite = open_suite("s", tmp_path)
    assert certificates.refusal(suite, tmp_path, False, at_risk=True) == ""
    assert "its tests cannot be altered" in certificates.refusal(suite, tmp_path, False), "they are a shell script"
