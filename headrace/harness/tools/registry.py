"""Tools by name: every module of this package that defines `TOOL`, and those from outside.

A new built-in tool is one file in this package. A tool from outside is one file anywhere: an entry point of the group
``headrace.tools``, or ``module:attribute``, in the tools of a task or in `[tasks] tools`.
"""

import importlib
import pkgutil

from headrace.harness import tools as package
from headrace.harness.tools.base import Tool
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


TOOLS: Registry[Tool] = Registry("tools", _built_in(), needs=("schema", "writes", "run"))


def schemas_of(names: tuple[str, ...]) -> tuple[ToolSchema, ...]:
    """The schemas of named tools. PluginError for an unknown one, and for two with one name in their schemas."""
    schemas = tuple(TOOLS.get(name).schema for name in names)
    seen: set[str] = set()
    for schema in schemas:
        if schema.name in seen:
            raise PluginError(f"headrace.tools: two tools of a task are called {schema.name!r}")
        seen.add(schema.name)
    return schemas
