"""delegate: a child agent works on a part of the task, in the same workspace, and reports.

The child is the same policy with the same tools and a context of its own, so the caller's context holds the report
alone. Its turns belong to the attempt (`Turn.caller`), are trained on like the others, and count for the attempt's
limits. A child has no children.
"""

from headrace.harness.tools.base import Answer, Workspace
from headrace.rendering.schemas import Parameter, ToolSchema

TURNS = 8
"""Turns of a child for which the call names none."""


class DelegateTool:
    """Runs a child agent."""

    schema, writes = (
        ToolSchema(
            "delegate",
            "let another agent do a part of the task here; it sees this text alone, and its last words return",
            (Parameter("turns", f"most turns that it may have, {TURNS} without a number", required=False),),
            Parameter("text", "what it has to do, with all that it needs to know"),
        ),
        True,
    )

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The child's report."""
        turns = arguments.get("turns", f"{TURNS}").strip()
        if not (turns.isascii() and turns.isdigit() and 0 < int(turns[:8]) < 1000):
            return Answer(f"turns: expected a number from 1 to 999, got {turns[:40]!r}", ok=False)
        call = workspace.call_id.rpartition("/")[2]
        if workspace.delegate is None:
            return Answer("no agent can be called from here", ok=False)
        return await workspace.delegate(call, arguments["text"], int(turns))


TOOL = DelegateTool()
