"""The budget of an MCP server holds over a resume."""

import pytest

from headrace.config.episodes import McpServer
from headrace.harness.mcp.connection import Connection, Listing, Offered
from headrace.harness.mcp.tools import offer
from headrace.harness.tools.registry import TOOLS
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import ToolCall
from headrace.tasks.generated.repositories import make
from headrace.tasks.local import LocalFiles


@pytest.mark.anyio
async def test_calls_before_a_resume_count() -> None:
    connection = Connection("wiki", McpServer(command=("false",), calls=2))
    tools = offer([connection], {"wiki": Listing(version="1", tools=(Offered(name="find", about="", schema={}),))})
    try:
        box, call = Toolbox(tuple(tools)), ToolCall(id="0.0", name="wiki_find")
        box.recall([call, ToolCall(id="0.1", name="wiki_find", error="malformed"), call])
        result = await box.run(call, LocalFiles({}), make("train", 4_000_000).task)
        assert (result.ok, result.output) == (False, "all 2 calls of wiki are used")
    finally:
        for name, tool in tools.items():
            TOOLS.withdraw(name, tool)
