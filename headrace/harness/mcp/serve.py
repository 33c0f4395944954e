"""headrace's tools as an MCP server: an external agent lists and calls them against one workspace."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.harness.tools.registry import schemas_of
from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages.rollout import ToolCall
from headrace.messages.sandbox import Sandbox, SandboxLost
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.rendering.native.renderer import as_text

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams

RESULT_CHARACTERS = 40_000
"""Most characters of an answer, some 10,000 tokens."""


def server_of(sandbox: Sandbox, names: Sequence[str], tests: TestPlan) -> "Server":
    """A server with these tools. tests: what run_tests runs. PluginError for a name that is not a tool."""
    from mcp.server import Server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    task = Task(
        ref=TaskRef("hand", "mcp"), family="mcp", prompt="", files={}, allowed=("**",), tests=tests, tools=tuple(names)
    )
    offered = tools_of(task)  # none of the web: this sandbox has no network access
    schemas = {schema.name: schema for schema in schemas_of(offered)}
    box = Toolbox(offered, details=True, cap=RESULT_CHARACTERS)
    numbers = itertools.count()

    async def listed(context: "ServerRequestContext", params: "PaginatedRequestParams | None") -> "ListToolsResult":
        tools = []
        for name, schema in schemas.items():
            reads = not box.writes(ToolCall(id="", name=name))
            function = schema.function()["function"]
            tools.append(
                Tool(
                    name=name,
                    description=schema.about,
                    input_schema=function["parameters"],
                    annotations=ToolAnnotations(read_only_hint=reads),
                )
            )
        return ListToolsResult(tools=tools)

    async def called(context: "ServerRequestContext", params: "CallToolRequestParams") -> "CallToolResult":
        arguments = {name: as_text(value) for name, value in (params.arguments or {}).items() if value is not None}
        schema = schemas.get(params.name)
        error = schema.complaint(arguments) if schema is not None else ""
        call = ToolCall(id=str(next(numbers)), name=params.name, arguments=arguments, error=error)
        try:
            result = await box.run(call, sandbox, task, "mcp/")
            output, ok = result.output, result.ok
        except SandboxLost as lost:
            output, ok = f"the sandbox is lost: {lost}; start this server again", False
        return CallToolResult(content=[TextContent(text=output)], is_error=not ok)

    return Server("headrace", version=__version__, on_list_tools=listed, on_call_tool=called)


async def serve(sandbox: Sandbox, names: Sequence[str], tests: TestPlan) -> None:
    """Serve over the standard streams until the client closes them."""
    from mcp.server.stdio import stdio_server

    server = server_of(sandbox, names, tests)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
