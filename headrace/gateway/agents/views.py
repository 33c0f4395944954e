"""The JSON objects of agents and runs."""

from typing import Any

from headrace.messages.product import Agent, AgentRun


def agent_view(agent: Agent) -> dict[str, Any]:
    """An agent without its runs."""
    last = agent.runs[-1]
    status = "ARCHIVED" if agent.archived else "ACTIVE"
    view = {"id": agent.id, "status": status, "latestRun": last.id, "latestRunStatus": last.state}
    return view | ({"set": agent.set_id} if agent.set_id else {})


def run_view(run: AgentRun) -> dict[str, Any]:
    """A run."""
    view = {
        "id": run.id,
        "status": run.state,
        "prompt": run.prompt,
        "createdAt": run.created,
        "endedAt": run.ended or None,
        "detail": run.detail,
        "changed": list(run.changed),
        "restored": run.restored,
    }
    return view | ({"check": check_view(run)} if run.check_code is not None or run.check_output else {})


def check_view(run: AgentRun) -> dict[str, Any]:
    """The outcome of the set's check on a run."""
    outcome = "not_run" if run.check_code is None else "failed" if run.check_code else "passed"
    return {"outcome": outcome, "exitCode": run.check_code, "output": run.check_output}
