"""The tool `lint` with a linter that the task or the run names, over a real sandbox of the process backend."""

import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.config import Environment
from headrace.harness.tools.toolbox import Toolbox, with_linter
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Acquire, Sandbox
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.vmhost.node.host import Host

pytestmark = pytest.mark.anyio
SHELL = b'for path in ${@:-*.sh}; do grep -Hn bad "$path"; done; test -z "$(cat ${@:-*.sh} | grep bad)"\n'
FILES = {"check": SHELL, "a.sh": b"echo bad\n", "b.sh": b"echo good\n", "many.sh": b"bad\n" * 80}
NUMBERS = itertools.count()
TASK = Task(ref=TaskRef("s", "t"), family="f", prompt="", files=FILES, allowed=(), tests=TestPlan())


@pytest.fixture(scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    host = await Host.open(Environment(backend="process", max_vms=64))
    wanted = Acquire(
        run="r1", lane="train", role="rollout", group="g000001", slot=0, attempt=0, isolation="group", files=FILES
    )
    try:
        yield await host.acquire(wanted)
    finally:
        await host.close()


async def lint(sandbox: Sandbox, task: Task, **arguments: str) -> ToolResult:
    call = ToolCall(id=str(next(NUMBERS)), name="lint", arguments=arguments)
    return await Toolbox(("lint",)).run(call, sandbox, task)


async def test_the_runs_linter_takes_the_place_of_ours(sandbox: Sandbox) -> None:
    task = with_linter(TASK, ("bash", "check"))
    two_files = await lint(sandbox, task, glob="[ab].sh")
    assert two_files.ok and two_files.output == "a.sh:1:echo bad"
    assert (await lint(sandbox, task, glob="b.*")).output == "no problems"
    whole = await lint(sandbox, task)
    assert whole.ok and whole.output.startswith("a.sh:1:echo bad\nmany.sh:1:bad\n")
    assert whole.output.endswith("and 31 more lines"), "81 lines, of which 50 are shown"
    assert (await lint(sandbox, task, glob="*.rs")).output == "no file matches *.rs"


async def test_a_tasks_own_linter_goes_first_and_no_linter_means_ours(sandbox: Sandbox) -> None:
    linted_task = msgspec.structs.replace(TASK, lint=("sh", "-c", "exit 3"))
    assert with_linter(linted_task, ("bash", "check")) == linted_task
    assert (await lint(sandbox, linted_task)).output == "sh ended with 3 and said nothing"
    assert with_linter(TASK, ()) == TASK and (await lint(sandbox, TASK)).output == "no problems"


async def test_a_linter_that_the_image_lacks_is_a_failed_call(sandbox: Sandbox) -> None:
    for arguments in ({}, {"glob": "a.sh"}):
        missing = await lint(sandbox, with_linter(TASK, ("no-such-linter",)), **arguments)
        assert not missing.ok and missing.output.startswith("the linter no-such-linter could not run: "), missing
