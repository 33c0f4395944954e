"""A trajectory as ATIF 1.8 (Agent Trajectory Interchange Format), which Harbor and others read.

Token ids and log-probabilities go along, so that another trainer needs no tokenisation of its own. Spans of versions,
the diff and the verdict have no field in ATIF and stand under ``extra``. A child agent is an embedded trajectory,
which the result of its call names.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory, Turn
from headrace.messages.tasks import Task

SCHEMA = "ATIF-v1.8"
Decode = Callable[[Sequence[int]], str]


def trajectory(
    made: Trajectory, task: Task, decode: Decode, score: Score | None = None, version: str = "", model: str = ""
) -> dict[str, Any]:
    """The document of one trajectory, ready for json.dumps. decode: token ids to text, of the policy's tokenizer."""
    prompt = f"{task.system}\n\n{task.prompt}" if task.system else task.prompt
    agent: dict[str, Any] = {"name": "headrace", "version": version or "0"}
    if model:
        agent["model_name"] = model
    told = _agent(made, UNSET, [prompt, *(step.prompt for step in task.later)], decode) | {"agent": agent}
    asked = {call.id: call.arguments.get("text", "") for turn in made.turns for call in turn.calls}
    callers = dict.fromkeys(turn.caller for turn in made.turns if turn.caller is not UNSET)
    if children := [_agent(made, caller, [asked[caller]], decode) | {"agent": agent} for caller in callers]:
        told["subagent_trajectories"] = children
    extra: dict[str, Any] = {
        "run": made.run,
        "lane": made.lane,
        "suite": made.task.suite,
        "task": made.task.task,
        "outcome": made.outcome,
        "changed": sorted(made.diff),
        "deleted": list(made.deleted),
    }
    if score is not None:
        extra |= {"verdict": score.verdict, "reward": score.reward, "judge": score.judge_version}
    return told | {"extra": extra}


def _agent(made: Trajectory, caller: str | UnsetType, prompts: Sequence[str], decode: Decode) -> dict[str, Any]:
    """The trajectory of one agent. caller: as in `Turn`. prompts: of its steps, the first one first."""
    prompt, *later = prompts
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": prompt}]
    children = {turn.caller for turn in made.turns}
    context: list[int] = []
    segment, waiting = -1, ""
    turns = [turn for turn in made.turns if turn.caller == caller]
    for turn in turns:
        if waiting and turn.kind != "summary":  # a summary at the end of a step precedes the next prompt
            steps.append({"step_id": len(steps) + 1, "source": "user", "message": waiting})
            waiting = ""
        if turn.segment != segment:
            segment, context = turn.segment, []
        context += [int(id) for id in turn.prompt_ids.tolist()]
        step = _step(turn, len(steps) + 1, context, decode)
        for result in step.get("observation", {}).get("results", ()):
            if (call := result["source_call_id"]) in children:
                result["subagent_trajectory_ref"] = [{"trajectory_id": f"{made.id}/{call}"}]
        steps.append(step)
        context += [int(id) for id in turn.ids.tolist()]
        waiting = later.pop(0) if turn.finishes and later else waiting
    return {
        "schema_version": SCHEMA,
        "session_id": f"{made.run}/{made.id}",
        "trajectory_id": made.id if caller is UNSET else f"{made.id}/{caller}",
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
            "total_completion_tokens": sum(len(turn.ids) for turn in turns),
            "total_steps": len(steps),
        },
    }


def _step(turn: Turn, number: int, context: Sequence[int], decode: Decode) -> dict[str, Any]:
    """A turn with its calls and their results."""
    ids = [int(id) for id in turn.ids.tolist()]
    step: dict[str, Any] = {
        "step_id": number,
        "source": "agent",
        "message": decode(ids),
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(context),
            "completion_tokens": len(ids),
            "prompt_token_ids": list(context),
            "completion_token_ids": ids,
            "logprobs": [float(value) for value in turn.logprobs.tolist()],
        },
        "extra": {
            "kind": turn.kind,
            "segment": turn.segment,
            "spans": [[span.start, span.end, span.version] for span in turn.spans],
        },
    }
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name or "unreadable", "arguments": dict(call.arguments)}
            for call in turn.calls
        ]
    if turn.results:
        step["observation"] = {
            "results": [{"source_call_id": result.call_id, "content": result.output} for result in turn.results]
        }
    return step
