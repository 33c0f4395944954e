"""The tools of one episode: runs a call, turns errors into answers, cuts long outputs and measures the time."""

import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.harness.tools.base import Answer, Delegate, Tool, Workspace, count_external, shortened, token_estimate
from headrace.harness.tools.registry import TOOLS
from headrace.harness.tools.search.semantic import NAME as SEMANTIC
from headrace.harness.tools.search.session import SearchSession
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox, SandboxLost
from headrace.messages.search import SearchLost
from headrace.messages.tasks import DEFAULT_TOOLS, Task

WEB = frozenset({"web_fetch", "web_search"})
"""Tools that a task without network access does not have, even if its list names them."""


def tools_of(task: Task) -> tuple[str, ...]:
    """The tools that a task offers: its list or the default list; none for a task without a sandbox. The web's only
    where the task allows network access, and web_search only where a search service is named."""
    if not task.sandbox:
        return ()
    offered = task.tools or DEFAULT_TOOLS
    missing = WEB if not task.network else frozenset() if task.web_search else frozenset({"web_search"})
    return tuple(name for name in offered if name not in missing)


def with_search(task: Task, available: bool) -> Task:
    """The task with keyword_search in place of semantic_search if the run has no search service (`available`)."""
    offered = tools_of(task)
    if available or SEMANTIC not in offered:
        return task
    without = ["keyword_search" if name == SEMANTIC else name for name in offered]
    return msgspec.structs.replace(task, tools=tuple(dict.fromkeys(without)))


def with_tools(task: Task, more: Sequence[str]) -> Task:
    """The task with `more` tools after its own; the same task if it has no sandbox."""
    if not more or not task.sandbox:
        return task
    offered = tools_of(task)
    return msgspec.structs.replace(task, tools=(*offered, *(name for name in more if name not in offered)))


def with_linter(task: Task, argv: tuple[str, ...]) -> Task:
    """The task with the run's linter `argv`; the same task if it has a linter of its own or the run has none."""
    return msgspec.structs.replace(task, lint=argv) if argv and not task.lint else task


def with_web_search(task: Task, address: str) -> Task:
    """The task with the run's search service; the same task if it names its own or the run has none."""
    return msgspec.structs.replace(task, web_search=address) if address and not task.web_search else task


class Toolbox:
    """The enabled tools. `details` adds test messages; `cap` is the most characters of a result."""

    def __init__(
        self,
        names: Sequence[str] = DEFAULT_TOOLS,
        *,
        details: bool = False,
        cap: int = 4000,
        search: SearchSession | None = None,
        count: Callable[[str], int] = token_estimate,
    ) -> None:
        """search: the episode's semantic search. count: the tokens of a text for the policy. PluginError when a name
        is not a tool."""
        tools: list[Tool] = [TOOLS.get(name) for name in names]
        self._tools = {tool.schema.name: tool for tool in tools}
        self._outside = {tool.schema.name for name, tool in zip(names, tools, strict=True) if not TOOLS.builtin(name)}
        self._external = {tool.schema.name for name, tool in zip(names, tools, strict=True) if TOOLS.external(name)}
        self._details, self._cap, self._search, self._count = details, cap, search, count
        self._memory: dict[str, str] = {}
        self.delegate: Delegate | None = None
        """Runs child agents; set by the loop."""

    @property
    def names(self) -> frozenset[str]:
        """The names by which the policy calls these tools."""
        return frozenset(self._tools)

    def writes(self, call: ToolCall) -> bool:
        """Whether the call may change the workspace, so that it must run alone and in call order."""
        tool = self._tools.get(call.name)
        return tool is not None and not call.error and tool.writes

    def external(self, call: ToolCall) -> bool:
        """Whether an MCP server answers the call."""
        return call.name in self._external and not call.error

    def repeatable(self, call: ToolCall) -> bool:
        """Whether the call gives the same answer again in an equal sandbox: not one that others answer."""
        return call.name not in {*WEB, "delegate"} and not self.external(call)

    def recall(self, calls: Sequence[ToolCall]) -> None:
        """Count the calls to MCP servers that were answered before the episode resumed."""
        for call in calls:
            if self.external(call):
                count_external(self._tools[call.name].schema.source, self._memory)

    async def run(self, call: ToolCall, sandbox: Sandbox, task: Task, prefix: str = "") -> ToolResult:
        """Answer one call. SandboxLost and SearchLost are raised. Other exceptions of a plugin become an answer that
        names them; those of a built-in tool are defects and are raised."""
        start = time.perf_counter()
        tool = self._tools.get(call.name)
        if call.error:
            answer = Answer(call.error, ok=False)
        elif tool is None:
            answer = Answer(f"no tool {call.name}; there are {', '.join(self._tools)}", ok=False)
        else:
            workspace = Workspace(
                sandbox, task, f"{prefix}{call.id}", self._details, self._memory, self._search, self._cap, self._count
            )
            workspace.delegate = self.delegate
            answer = await self._answer(tool, call, workspace)
        # Half of a surrogate pair, which a tool may have read as JSON, is no text that a message can carry.
        text = answer.output.encode("utf-8", "backslashreplace").decode()
        output = shortened(text, self._cap)
        return ToolResult(
            call_id=call.id,
            ok=answer.ok,
            output=output,
            truncated=len(text) > self._cap,
            wall_ms=(time.perf_counter() - start) * 1e3,
            retrieved=answer.retrieved,
        )

    async def _answer(self, tool: Tool, call: ToolCall, workspace: Workspace) -> Answer:
        try:
            return await tool.run(call.arguments, workspace)
        except (SandboxLost, SearchLost):
            raise
        except Exception as error:
            if call.name not in self._outside:
                raise
            return Answer(f"{call.name} failed: {type(error).__name__}: {error}"[:500], ok=False)
