"""Tools by name: the built-in tools, plugins, and the tools of MCP servers.

A new built-in tool is one file in this package that defines `TOOL`. A plugin is one file anywhere; the tools of a task
or `[tasks] tools` name it by an entry point of the group ``headrace.tools`` or as ``module:attribute``.
"""

import importlib
import pkgutil

from headrace.harness import tools as package
from headrace.harness.tools.base import Tool
from headrace.messages.plugins import Plugin
from headrace.registry import PluginError, Registry
from headrace.rendering.schemas import ToolSchema


def _built_in() -> dict[str, str]:
    """Name to ``module:TOOL`` of every tool in this package."""
    names: dict[str, str] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name == __name__ or module.name.endswith(".toolbox"):
            continue
        tool: Tool | None = getattr(importlib.import_module(module.name), "TOOL", None)
        if tool is not None:
            names[tool.schema.name] = f"{module.name}:TOOL"
    return names


class Tools(Registry[Tool]):
    """The registry of tools. It includes the tools of MCP servers, named ``SERVER/TOOL``, while an actor of this
    process offers them."""

    def __init__(self, builtin: dict[str, str]) -> None:
        super().__init__("tools", builtin, needs=("schema", "writes", "run"))
        self._offered: dict[str, tuple[Tool, Plugin]] = {}

    def offer(self, name: str, tool: Tool, plugin: Plugin) -> None:
        """Add or replace a tool. plugin: its identity, which other nodes of the run compare with theirs."""
        self._offered[name] = (tool, plugin)

    def withdraw(self, name: str, tool: Tool) -> None:
        """Remove a tool, unless another actor has replaced it."""
        if name in self._offered and self._offered[name][0] is tool:
            del self._offered[name]

    def external(self, name: str) -> bool:
        """Whether an MCP server answers the tool's calls; such calls cannot be repeated."""
        return name in self._offered

    def get(self, name: str) -> Tool:
        """As `Registry.get`. PluginError for a tool that no declared MCP server offers."""
        if name in self._offered:
            return self._offered[name][0]
        server, slash, tool = name.partition("/")
        if slash and ":" not in name:
            raise PluginError(f"headrace.tools: no MCP server {server!r} offers {tool!r}; declare it in [tasks.mcp]")
        return super().get(name)

    def plugin(self, name: str) -> Plugin | None:
        """As Registry.plugin; the source of an MCP server's tool is the hash of its schema."""
        return self._offered[name][1] if name in self._offered else super().plugin(name)


TOOLS = Tools(_built_in())


def schemas_of(names: tuple[str, ...]) -> tuple[ToolSchema, ...]:
    """The schemas of the named tools. PluginError for an unknown tool, and for two schemas with one name."""
    schemas = tuple(TOOLS.get(name).schema for name in names)
    seen: set[str] = set()
    for schema in schemas:
        if schema.name in seen:
            raise PluginError(f"headrace.tools: two tools of a task are called {schema.name!r}")
        seen.add(schema.name)
    return schemas
