"""An external MCP server for tests: `python mcp_server.py [PORT]` speaks stdio, or HTTP on a port."""

import os
import sys

import anyio
from mcp.server import MCPServer

server = MCPServer("docs", version="1")


@server.tool()
def repeat(text: str, times: int = 2) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def secret() -> str:
    """Show a variable of the environment."""
    return os.environ.get("MCP_SECRET", "none")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
