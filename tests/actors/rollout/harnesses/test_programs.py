"""Harnesses that other people released, unmodified: each fixes a bug by a scripted policy, and is judged
(`make test-harnesses`, which makes the bundles)."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.harnesses import bundles, programs
from headrace.messages.rollout import Trajectory
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.qemu import process
from tests.conftest import Connect
from tests.support.client_engine import Said
from tests.support.harness_images import CACHE, FIX, SUITE, image_task
from tests.support.harness_run import LIMITS, fixes, harness_run

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

DONE: Said = ("Fixed.", [])
SUBMIT: Said = ("I submit.", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])


class Case(NamedTuple):
    """A harness that fixes the bug."""

    name: str
    call: str
    """Its tool that runs a command, whose name is in the prompts of the conversation that fixes the bug."""
    key: str
    end: Said
    """The policy's last turn."""


CASES = (
    Case("mini-swe-agent", "bash", "command", SUBMIT),
    Case("codex", "exec_command", "cmd", DONE),
    Case("claude-code", "Bash", "command", DONE),
    Case("opencode", "bash", "command", DONE),
)
BACKENDS = [
    "process",
    pytest.param("container", marks=pytest.mark.skipif(bool(unavailable()), reason="no containers here")),
    pytest.param("qemu", marks=pytest.mark.vm),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_program_fixes_a_bug_and_is_judged(connect: Connect, tmp_path: Path, case: Case, backend: str) -> None:
    assert bundles.find(CACHE, programs.KNOWN[case.name]), f"make its bundle: headrace harness {case.name}"
    if (backend, case.name) == ("qemu", "opencode") and (why := process.no_kvm()):
        pytest.skip(f"emulated, its program asks for no turn within ten minutes: {why}")
    fix: Said = fixes(case.call, case.key)
    where: dict[str, Any] = {"limits": msgspec.structs.replace(LIMITS, wall_s=600.0)}
    if backend != "process":
        image_task("debian", tmp_path)
        where |= {"suite": SUITE, "id": "1", "isolation": "episode"}
        fix = ("I fix it.", [(case.call, {case.key: FIX})])
    name = f"{case.name}-{backend}"
    mark = f'"{case.call}"'
    async with harness_run(connect, tmp_path, name, case.name, [fix, case.end], mark=mark, backend=backend) as there:
        made = await there.attempt(**where)
        assert isinstance(made, Trajectory), made
        assert made.outcome == "finished" and made.harness, made
        assert made.plugins[-1].name == case.name and made.touched == ()
        assert (await there.score()).verdict == "passed"
