"""External MCP servers as tools: `[tasks.mcp.NAME]` declares a server, a task offers its tools as ``NAME/TOOL``.

A server runs on the rollout actor's machine, not in a sandbox, so it can reach everything that this machine can reach.
Hence a task gets a tool only when the task (`Task.tools`) or the operator (`[tasks] tools`, for every task) names it.
The first start stores the list of tools in the run's folder. Schemas are part of the prompt, so later starts use the
stored list, also when the server has been updated or is down.
"""

import asyncio
import importlib.util
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from headrace.harness.mcp.connection import Connection, Listing, McpError, Offered, Settings
from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace, count_external
from headrace.harness.tools.registry import TOOLS
from headrace.messages.plugins import Plugin

LISTING = "mcp.json"
"""The file in the run's folder that stores the tools of each server."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class McpTool:
    """One tool of a server."""

    def __init__(self, connection: Connection, offered: Offered) -> None:
        """McpError for a schema with an argument name that a policy cannot write."""
        self._connection, self._offered = connection, offered
        self.schema, self.writes = schema_of(connection.name, offered), not offered.reads

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The server's answer, cut to `result_bytes`; a failure of the server is an answer that is not ok."""
        limits = self._connection.section
        if count_external(self._connection.name, workspace.memory) >= limits.calls:
            return Answer(f"the episode has used all {limits.calls} calls of {self._connection.name}", ok=False)
        try:
            typed = typed_arguments(arguments, self._offered.schema.get("properties", {}))
            text, ok = await self._connection.call(self._offered.name, typed)
        except McpError as error:
            return Answer(str(error), ok=False)
        data = text.encode("utf-8", "replace")
        if len(data) > limits.result_bytes:
            head = data[: limits.result_bytes].decode("utf-8", "ignore")
            text = f"{head}\n[{len(data) - limits.result_bytes} bytes cut]"
        return Answer(text, ok=ok)


class McpServers:
    """The servers of one actor, whose tools are in the registry until `close`."""

    def __init__(self, connections: list[Connection], tools: dict[str, McpTool]) -> None:
        self._connections, self._tools = connections, tools

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tools, as tasks write them."""
        return tuple(self._tools)

    async def close(self) -> None:
        """Remove the tools and end the connections."""
        for name, tool in self._tools.items():
            TOOLS.withdraw(name, tool)
        await asyncio.gather(*(connection.close() for connection in self._connections))


async def open_servers(sections: Mapping[str, Settings], folder: Path) -> McpServers:
    """Offer the tools of all configured servers. folder: the run's folder. McpError when a server does not list its
    tools."""
    if sections and importlib.util.find_spec("mcp") is None:
        raise McpError("[tasks.mcp] needs the package mcp: pip install 'headrace[mcp]'")
    connections = [Connection(name, section, folder / f"mcp-{name}.log") for name, section in sections.items()]
    try:
        cached = listings(folder)
        missing = [connection for connection in connections if connection.name not in cached]
        for connection, listing in zip(missing, await _all(missing), strict=True):
            cached[connection.name] = listing
        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{LISTING}.{os.getpid()}.part"
            part.write_bytes(msgspec.json.encode(cached))
            os.replace(part, folder / LISTING)
        return McpServers(connections, offer(connections, cached))
    except BaseException:
        await asyncio.gather(*(connection.close() for connection in connections))
        raise


async def _all(connections: list[Connection]) -> list[Listing]:
    results = await asyncio.gather(*(connection.listing() for connection in connections), return_exceptions=True)
    listed: list[Listing] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        listed.append(result)
    return listed


def offer(connections: list[Connection], by_server: dict[str, Listing]) -> dict[str, McpTool]:
    """Put the servers' tools into the registry; return them by the names that tasks use. McpError for an unusable
    schema."""
    tools: dict[str, McpTool] = {}
    for connection in connections:
        listing = by_server[connection.name]
        for offered in listing.tools:
            tools[f"{connection.name}/{offered.name}"] = McpTool(connection, offered)
    for name, tool in tools.items():
        source = blake2b(msgspec.json.encode(tool.schema), digest_size=32).hexdigest()
        version = by_server[name.partition("/")[0]].version
        TOOLS.offer(name, tool, Plugin(seam="tools", name=name, version=version, source=source))
    return tools


def listings(folder: Path) -> dict[str, Listing]:
    """The listings in a run's folder; empty before the first start. McpError for an unreadable file."""
    file = folder / LISTING
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Listing])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise McpError(
            f"{file} is not a list of tools: {error}; remove it, and the next start writes it anew"
        ) from None


def schema_of(server: str, offered: Offered) -> ToolSchema:
    """A server's tool as a policy sees it, named ``SERVER_TOOL``. McpError for an argument name that is not an
    identifier."""
    schema = offered.schema
    properties: dict[str, Any] = schema.get("properties", {})
    required = tuple(schema.get("required", ()))
    parameters = []
    for name, argument in properties.items():
        if not _NAME.fullmatch(name):
            raise McpError(
                f"MCP tool {server}/{offered.name}: the argument {name!r} is not a valid name; remove this "
                f"server from the configuration"
            )
        about = str(argument.get("description", "") or argument.get("title", "")) if isinstance(argument, dict) else ""
        parameters.append(Parameter(name, about, name in required))
    parameters.sort(key=lambda parameter: not parameter.required)
    shown = {"type": "object", "properties": properties, "required": list(required)}
    shown |= {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    name = re.sub(r"[^A-Za-z0-9_]", "_", f"{server}_{offered.name}")
    about = " ".join(offered.about.split())
    return ToolSchema(name, about, tuple(parameters), json=msgspec.json.encode(shown).decode(), source=server)


def typed_arguments(arguments: dict[str, str], properties: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as JSON values; a text stays a string where the schema allows strings. McpError for a
    value that is not JSON."""
    typed: dict[str, Any] = {}
    for name, text in arguments.items():
        argument = properties.get(name)
        kind = argument.get("type") if isinstance(argument, dict) else None
        if kind == "string" or (isinstance(kind, list) and "string" in kind):
            typed[name] = text
            continue
        try:
            typed[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            if kind is not None:
                raise McpError(f"{name}: expected {kind}, got {text[:80]!r}") from None
            typed[name] = text
    return typed
