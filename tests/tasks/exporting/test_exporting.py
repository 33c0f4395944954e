"""Suites as Harbor folders that come back as the same tasks, and trajectories as ATIF documents."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.main import main
from headrace.config import Environment
from headrace.judging import Candidate, HostMachines, Options, examine
from headrace.judging.verdicts import Verdict
from headrace.messages.base import Array
from headrace.messages.rollout import ToolCall, ToolResult, Turn
from headrace.messages.tasks import Step
from headrace.tasks import Suite, open_suite
from headrace.tasks.exporting.atif import trajectory as document
from headrace.vmhost.node.host import Host
from tests.support.judging import TASK, trajectory
from tests.support.playing import report

pytestmark = pytest.mark.anyio


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


async def judged(host: Host, suite: Suite, id: str, diff: dict[str, bytes]) -> Verdict:
    made = trajectory("r", f"{id}-{len(diff)}", diff, isolation="episode", task=suite.task(id).ref)
    candidate = Candidate(trajectory=made, task=suite.task(id), oracle=suite.oracle(id))
    return await examine(candidate, HostMachines(host), report, Options())


async def test_exported_tasks_come_back(host: Host, tmp_path: Path) -> None:
    folder, suites = tmp_path / "out", tmp_path / "suites"
    assert main(["tasks", "export", "generated/heldout", str(folder), "--tasks", "2"]) == 0
    where = ["--set", f"tasks.dir={suites}"]
    assert main(["tasks", "import", "harbor", str(folder), "--name", "back", "--template", "debian", *where]) == 0
    before, after = open_suite("generated/heldout"), open_suite("back", suites)
    assert list(after.ids()) == list(before.ids()[:2])
    for id in after.ids():
        assert after.task(id).files == before.task(id).files
        gold = await judged(host, after, id, before.oracle(id).solution)
        assert (gold.decision, gold.value) == ("passed", 1.0)
        assert (await judged(host, after, id, {})).decision == "failed"


def test_a_task_without_a_form_in_harbor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "sum", "prompt": "1 + 1?", "answer": "2"}\n')
    where = ["--set", f"tasks.dir={tmp_path / 'suites'}"]
    assert main(["tasks", "import", "jsonl", str(tmp_path / "rows.jsonl"), *where]) == 0
    assert main(["tasks", "export", "rows", str(tmp_path / "out"), *where]) == 1
    assert "refused sum: a task without a sandbox has no environment" in capsys.readouterr().out
    assert main(["tasks", "export", "generated/heldout", str(tmp_path), *where]) == 2


def test_a_trajectory_is_an_atif_document() -> None:
    call = ToolCall(id="0.0", name="read_file", arguments={"path": "a.py"})
    result = ToolResult(call_id="0.0", ok=True, output="x = 1")
    parts: dict[str, Any] = {"logprobs": Array.of([-0.5], "<f4"), "ids": Array.of([9], "<i4")}
    turns = (
        Turn(index=0, segment=0, prompt_ids=Array.of([1, 2], "<i4"), calls=(call,), results=(result,), **parts),
        Turn(index=1, segment=0, prompt_ids=Array.of([3], "<i4"), **parts),
        Turn(index=2, segment=1, prompt_ids=Array.of([4], "<i4"), **parts),
    )
    made = trajectory("r", "g", {"a.py": b""}, turns=turns)
    told = json.loads(json.dumps(document(made, TASK, lambda ids: f"text {list(ids)}", version="1")))
    assert told["schema_version"] == "ATIF-v1.8" and told["trajectory_id"] == made.id
    assert [step["step_id"] for step in told["steps"]] == [1, 2, 3, 4]
    assert [step["metrics"]["prompt_token_ids"] for step in told["steps"][1:]] == [[1, 2], [1, 2, 9, 3], [4]]
    calls = {call["tool_call_id"] for call in told["steps"][1]["tool_calls"]}
    assert {entry["source_call_id"] for entry in told["steps"][1]["observation"]["results"]} <= calls
    agent_only = {"tool_calls", "metrics", "reasoning_content", "model_name"}
    assert not agent_only & told["steps"][0].keys() and told["steps"][0]["source"] == "user"
    assert told["final_metrics"] == {"total_prompt_tokens": 4, "total_completion_tokens": 3, "total_steps": 4}


def test_a_child_agent_is_an_embedded_trajectory() -> None:
    call = ToolCall(id="0.0", name="delegate", arguments={"text": "look"})
    result = ToolResult(call_id="0.0", ok=True, output="seen")
    parts: dict[str, Any] = {"logprobs": Array.of([-0.5], "<f4"), "ids": Array.of([9], "<i4")}
    turns = (
        Turn(index=0, segment=0, prompt_ids=Array.of([1, 2], "<i4"), calls=(call,), results=(result,), **parts),
        Turn(index=1, segment=1, prompt_ids=Array.of([4], "<i4"), caller="0.0", **parts),
        Turn(index=2, segment=0, prompt_ids=Array.of([3], "<i4"), **parts),
    )
    made = trajectory("r", "g", {}, turns=turns)
    told = json.loads(json.dumps(document(made, TASK, str, version="1")))
    (child,) = told["subagent_trajectories"]
    (named,) = told["steps"][1]["observation"]["results"][0]["subagent_trajectory_ref"]
    assert named["trajectory_id"] == child["trajectory_id"] != told["trajectory_id"]
    assert [step["message"] for step in child["steps"]] == ["look", "[9]"]
    assert [step["metrics"]["prompt_token_ids"] for step in told["steps"][1:]] == [[1, 2], [1, 2, 9, 3]]


def test_the_prompts_of_later_steps_are_messages_of_the_user() -> None:
    parts: dict[str, Any] = {"logprobs": Array.of([-0.5], "<f4"), "ids": Array.of([9], "<i4"), "segment": 0}
    parts["prompt_ids"] = Array.of([1], "<i4")
    end: dict[str, Any] = {"calls": (ToolCall(id="e", name="finish"),)}
    turns = (
        Turn(index=0, **parts, **end),
        Turn(index=1, **parts, kind="summary"),
        Turn(index=2, **parts, **end),
        Turn(index=3, **parts, **end),
    )
    task = msgspec.structs.replace(TASK, steps=(Step(prompt="second"), Step(prompt="third")))
    told = document(trajectory("r", "g", {}, turns=turns), task, str)
    assert [step["source"] for step in told["steps"]] == ["user", "agent", "agent", "user", "agent", "user", "agent"]
    assert [step["message"] for step in told["steps"] if step["source"] == "user"][1:] == ["second", "third"]
    assert [step["step_id"] for step in told["steps"]] == list(range(1, 8))
    told = document(trajectory("r", "g", {}, turns=turns[:1]), task, str)
    assert len(told["steps"]) == 2, "the policy never saw the prompt of a step in which it took no turn"
