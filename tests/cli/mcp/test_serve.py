"""`headrace mcp serve`: a real MCP client lists and calls the tools against a workspace."""

import importlib.util
import io
import sys
import tarfile
from pathlib import Path

import pytest

# Imported in the test alone: the package takes a second of processor time, which every worker would spend.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed"),
]


@pytest.mark.parametrize(("mode", "version"), [("2026-07-28", "2026-07-28"), ("legacy", "2025-11-25")])
async def test_an_agent_lists_and_calls_the_tools_in_a_workspace(tmp_path: Path, mode: str, version: str) -> None:
    from mcp import Client, StdioServerParameters
    from mcp.types import TextContent

    pushed, pulled = tmp_path / "project", tmp_path / "after.tar"
    pushed.mkdir()
    (pushed / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    arguments = ["-m", "headrace.cli", "mcp", "serve", "--push", str(pushed), "--pull", str(pulled)]
    arguments += ["--set", "environment.backend=process", "--set", f"environment.cache_dir={tmp_path}"]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments), mode=mode) as client:
        assert client.protocol_version == version
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"read_file", "edit", "terminal", "run_tests"} <= set(tools) and "finish" not in tools
        assert tools["read_file"].input_schema["required"] == ["path"]
        assert tools["read_file"].annotations is not None and tools["read_file"].annotations.read_only_hint

        async def call(name: str, **arguments: str) -> tuple[str, bool]:
            result = await client.call_tool(name, arguments)
            (block,) = result.content
            assert isinstance(block, TextContent)
            return block.text, result.is_error

        assert await call("read_file", path="calc.py") == ("1:def add(a, b):\n2:    return a - b", False)
        assert await call("read_file") == ("read_file: path is missing", True)
        assert (await call("write_file", path="calc.py", text="def add(a, b):\n    return a + b\n"))[1] is False
        command = "python3 -c 'import calc; print(calc.add(2, 3))'"
        assert await call("terminal", command=command) == ("5", False)
    with tarfile.open(fileobj=io.BytesIO(pulled.read_bytes())) as archive:
        names = [name for name in archive.getnames() if name.endswith("calc.py")]
        member = archive.extractfile(names[0])
        assert member is not None and member.read() == b"def add(a, b):\n    return a + b\n"
