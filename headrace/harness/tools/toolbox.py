"""The tools of a task by name, and how a call becomes a result: errors answered, output capped, time taken."""

import time
from collections.abc import Sequence

from headrace.harness.tools.base import Answer, Tool, Workspace
from headrace.harness.tools.files import EditFileTool, ListFilesTool, ReadFileTool, WriteFileTool
from headrace.harness.tools.search import SearchTool
from headrace.harness.tools.semantic import SemanticSearchTool
from headrace.harness.tools.terminal import LintTool, TerminalTool
from headrace.harness.tools.testing import RunTestsTool
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task


class FinishTool:
    """The end of the task; the loop stops after the turn that calls it."""

    name, writes = "finish", True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Nothing to do."""
        return Answer("done")


_TOOLS: tuple[Tool, ...] = (
    SearchTool(),
    ReadFileTool(),
    ListFilesTool(),
    EditFileTool(),
    WriteFileTool(),
    RunTestsTool(),
    TerminalTool(),
    LintTool(),
    SemanticSearchTool(),
    FinishTool(),
)

ALL: tuple[str, ...] = tuple(tool.name for tool in _TOOLS)
SMALL: tuple[str, ...] = ("search", "read_file", "edit_file", "run_tests", "finish")
"""What the tiny policy is given: enough for generated repositories."""


def tools_of(task: Task) -> tuple[str, ...]:
    """The tools of a task's suite: generated repositories get the small set, real ones all."""
    return SMALL if task.ref.suite.startswith("generated/") else ALL


class Toolbox:
    """The enabled tools. `details` adds test messages; `cap` is the most characters of a result."""

    def __init__(self, names: Sequence[str] = ALL, *, details: bool = False, cap: int = 4000) -> None:
        known = {tool.name: tool for tool in _TOOLS}
        self._tools = {name: known[name] for name in names}
        self._details, self._cap = details, cap

    def writes(self, call: ToolCall) -> bool:
        """Whether the call must run alone: it changes the workspace, so its place among the others matters."""
        tool = self._tools.get(call.name)
        return tool is not None and not call.error and tool.writes

    async def run(self, call: ToolCall, sandbox: Sandbox, task: Task, prefix: str = "") -> ToolResult:
        """Answer one call. Whatever the policy wrote gets an answer; only SandboxLost escapes."""
        start = time.perf_counter()
        tool = self._tools.get(call.name)
        if call.error:
            answer = Answer(call.error, ok=False)
        elif tool is None:
            answer = Answer(f"no tool {call.name}; there are {', '.join(self._tools)}", ok=False)
        else:
            workspace = Workspace(sandbox, task, f"{prefix}{call.id}", self._details)
            answer = await tool.run(call.arguments, workspace)
        output, cut = answer.output, len(answer.output) > self._cap
        if cut:
            half = self._cap // 2
            output = f"{output[:half]}\n[{len(output) - 2 * half} characters cut]\n{output[-half:]}"
        wall_ms = (time.perf_counter() - start) * 1e3
        return ToolResult(call_id=call.id, ok=answer.ok, output=output, truncated=cut, wall_ms=wall_ms)
