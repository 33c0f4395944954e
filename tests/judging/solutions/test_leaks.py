"""The search for a solution and for hidden tests in a sandbox, with its own find and git."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.config import Environment
from headrace.judging.certifying import with_hidden
from headrace.judging.solutions import leaks
from headrace.messages.sandbox import Acquire, Exec, Sandbox, WriteFiles
from headrace.messages.tasks import Oracle, Step, Steps, StepTests, Task, TaskRef, TestPlan
from headrace.vmhost.node.host import Host
from tests.support.records import of

pytestmark = pytest.mark.anyio

BUG = b"def larger(a, b):\n    return a if a < b else b\n"
RIGHT = BUG.replace(b"<", b">")
HISTORY = """set -e
git init -q
save() { git add -A && git -c user.name=a -c user.email=a@b commit -qm "$1"; }
save bug
sed -i 's/</>/' code_.py
echo 'assert larger(1, 2) == 2  # and a comment of some length' > test_code.py
save repair
git diff HEAD~1 -- test_code.py
git reset -q --hard HEAD~1
git reflog expire --expire=now --all  # the objects stay, and no name leads to them
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    host = await Host.open(Environment(backend="process", max_vms=2))
    fields = {"run": "r", "lane": "eval", "group": "g", "slot": 0, "attempt": 0}
    yield await host.acquire(Acquire(role="judge", isolation="episode", files={"code_.py": BUG}, **fields))  # type: ignore[arg-type]
    await host.close()


def oracle(hidden: dict[str, bytes]) -> Oracle:
    plan = TestPlan(kind="command", argv=("true",))
    return Oracle(ref=TaskRef("s", "1"), hidden=hidden, tests=plan, expected=(), solution={}, script="short")


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.call(Exec(argv=("sh", "-c", script)))
    assert done.ok, done
    return done.stdout


async def test_objects_without_a_name_are_found(sandbox: Sandbox) -> None:
    patch = (await sh(sandbox, HISTORY)).encode()
    assert b"+assert larger" in patch
    found = await leaks.in_image(sandbox, oracle({"p": patch}), {"code_.py": RIGHT})
    assert found.leaks == (
        "the repository's history holds the solution of code_.py",
        "the repository's history holds the hidden tests of test_code.py",
    )
    assert found.notes == ()
    other = RIGHT.replace(b"larger", b"smaller")
    assert await leaks.in_image(sandbox, oracle({"p": b"no patch"}), {"code_.py": other}) == leaks.Found()


async def test_copies_are_found_and_short_files_do_not_count(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir -p a/b; sed 's/</>/' code_.py > 'a/b/the copy'; echo short > c; printf '' > empty")
    hidden = {"test_code.py": RIGHT.replace(b"a", b"c"), "__init__.py": b"", "d": b"short\n", "in.json": BUG}
    found = await leaks.in_image(sandbox, oracle(hidden), {"code_.py": RIGHT})
    assert found.leaks == ("a/b/the copy holds the solution of code_.py",)
    assert found.notes == ("code_.py is the hidden file in.json",)


async def test_a_history_that_git_cannot_read_is_a_note(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir .git")
    found = await leaks.in_image(sandbox, oracle({}), {"code_.py": RIGHT})
    assert found.leaks == () and "history was not searched: fatal: not a git repository" in found.notes[0]


SECRET = b"grep -q 'the expected line of the result' /app/result\n"


def stepwise(*files: dict[str, bytes]) -> tuple[Task, Oracle]:
    """A task whose later steps have these files, with a test of its own for every step."""
    plan = TestPlan(kind="command", argv=("true",))
    names = ("first", "second", "third")[: len(files) + 1]
    tests = [
        StepTests(name=name, hidden={"test.sh": name.encode() + SECRET}, tests=plan, script=f"solve {name} {'x' * 40}")
        for name in names
    ]
    later = tuple(Step(prompt="Go on.", files=given) for given in files)
    task = Task(ref=TaskRef("s", "1"), family="f", prompt="Begin.", files={}, allowed=(), tests=plan, steps=later)
    steps = Steps(tests=tuple(tests))
    return task, msgspec.structs.replace(oracle({}), steps=steps)


def test_a_file_of_a_step_may_be_the_test_of_an_earlier_one_alone() -> None:
    first, second, third = (name + SECRET for name in (b"first", b"second", b"third"))
    task, secret = stepwise({"old.sh": first, "now.sh": second}, {"old.sh": second, "now.sh": third, "more.txt": third})
    assert leaks.told(task, secret, {}, {}).leaks == (
        "now.sh, a file of the step second, is a hidden test file",
        "now.sh, a file of the step third, is a hidden test file",
    )
    task, secret = stepwise({"soon.sh": third}, {})
    assert leaks.told(task, secret, {}, {}).leaks == ("soon.sh, a file of the step second, is a hidden test file",)


async def test_tests_and_programs_of_every_step_are_searched_for(sandbox: Sandbox) -> None:
    _, secret = stepwise({})
    assert isinstance(secret.steps, Steps)
    scripts = {f"{step.name}.sh": step.script.encode() for step in secret.steps.tests}
    await sandbox.call(WriteFiles(files={"a": b"first" + SECRET, "b": b"second" + SECRET} | scripts))
    found = await leaks.in_image(sandbox, with_hidden(secret), {})
    assert sorted(found.leaks) == [
        "a is the hidden file steps/first/test.sh",
        "b is the hidden file steps/second/test.sh",
        "first.sh is the solution's program",
        "second.sh is the solution's program",
    ]


def test_a_file_that_gets_another_name_is_no_leak() -> None:
    lines = "".join(f"value_{number} = compute({number}, 'a long enough line')\n" for number in range(12)).encode()
    edited = lines + b"value_12 = compute(12, 'one more line, which the repair adds')\n"
    plan = TestPlan(kind="pytest")
    task = of(Task, ref=TaskRef("s", "1"), files={"a.txt": lines, "b/c.txt": lines[::-1]}, allowed=(), tests=plan)
    for solution in ({"new.txt": lines}, {"new.txt": edited}, {"d/a.txt": lines, "d/c.txt": lines[::-1]}):
        known = Oracle(ref=TaskRef("s", "1"), hidden={}, tests=plan, expected=(), solution=solution)
        assert leaks.told(task, known, task.files, solution, ("a.txt", "b/c.txt")).leaks == ()
        assert bool(leaks.told(task, known, task.files, solution).leaks), "a copy that stays is read by the agent"
    others = task.files | {"hint.txt": edited}
    known = Oracle(ref=TaskRef("s", "1"), hidden={}, tests=plan, expected=(), solution={"new.txt": edited})
    found = leaks.told(task, known, others, {"new.txt": edited}, ("a.txt",)).leaks
    assert found[:1] == ("hint.txt holds the solution of new.txt",)


async def test_a_file_of_an_image_that_gets_another_name_is_no_leak(sandbox: Sandbox) -> None:
    text = "a text that is long enough to be searched for, really\n"
    commit = "git add . && git -c user.name=a -c user.email=a@b commit -qm base"
    await sh(sandbox, f"git init -q && printf '{text}' > a.txt && {commit}")
    known = oracle({})
    assert await leaks.in_image(sandbox, known, {"b.txt": text.encode()}, ("a.txt",)) == leaks.Found()
    found = await leaks.in_image(sandbox, known, {"b.txt": text.encode()})
    assert found.leaks == (
        "a.txt holds the solution of b.txt",
        "the repository's history holds the solution of b.txt",
    )
