"""Harnesses that other people released, unmodified: each fixes a bug by a scripted policy, and is judged
(`make test-clients`; the bundles are made by `headrace harness`)."""

from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.harnesses import bundles, programs
from headrace.messages.rollout import Trajectory
from tests.conftest import Connect
from tests.support.client_engine import Said
from tests.support.harness_run import fixes, harness_run
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

CACHE = ROOT / ".cache" / "headrace"
DONE: Said = ("Fixed.", [])
SUBMIT: Said = ("I submit.", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])


class Case(NamedTuple):
    """A harness, the policy's turns, and what names the conversation that fixes the bug."""

    name: str
    turns: list[Said]
    mark: str


CASES = (
    Case("mini-swe-agent", [fixes(), SUBMIT], '"name": "bash"'),
    Case("codex", [fixes("exec_command", "cmd"), DONE], '"exec_command"'),
    Case("claude-code", [fixes("Bash"), DONE], '"name": "Bash"'),
    Case("opencode", [fixes("bash"), DONE], '"name": "bash"'),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_program_fixes_a_bug_and_is_judged(connect: Connect, tmp_path: Path, case: Case) -> None:
    if bundles.find(CACHE, programs.KNOWN[case.name]) is None:
        pytest.skip(f"no bundle: headrace harness {case.name}")
    run = f"p-{case.name}"
    async with harness_run(connect, tmp_path, run, case.name, case.turns, mark=case.mark) as there:
        made = await there.attempt()
        assert isinstance(made, Trajectory), made
        assert made.outcome == "finished" and made.harness, made
        assert made.plugins[-1].name == case.name and made.touched == ()
        assert (await there.score()).verdict == "passed"
