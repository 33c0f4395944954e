"""The tools in the prompt of a policy: tags in the terse format, JSON Schema in chat formats.

    <search query="mean" glob="*.py"/>
    <edit_file path="kit/core.py" lines="4-5">    return total / count</edit_file>

One attribute per parameter in the table's order; one parameter may be the body, taken verbatim between the tags,
because code in an attribute would need quoting. Attribute values escape ``& " < >`` as XML does; a body escapes
only its own closing tag. The tags are cut so that a tokenizer can give each one id: ``<edit_file path="``, ``"
lines="``, ``">``.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec


class Parameter(msgspec.Struct, frozen=True):
    """One argument of a tool."""

    name: str
    about: str
    required: bool = True


class ToolSchema(msgspec.Struct, frozen=True):
    """One tool: tags of the terse format, JSON Schema for chat templates.

    The first attribute, when there is one, is part of the opening tag, so it comes first.
    """

    name: str
    about: str
    attributes: tuple[Parameter, ...] = ()
    body: Parameter | None = None
    json: str = ""
    """JSON Schema of the arguments as text, of a tool that has one of its own; empty: every argument is a text."""
    source: str = ""
    """The MCP server that answers; empty for tools of a sandbox."""

    @property
    def opening(self) -> str:
        """The first tag of a call with its first attribute, such as ``<read_file path="``."""
        return f'<{self.name} {self.attributes[0].name}="' if self.attributes else f"<{self.name}>"

    @property
    def closing(self) -> str:
        """``</name>``."""
        return f"</{self.name}>"

    @property
    def empty(self) -> str:
        """``<name/>``: the call without any argument."""
        return f"<{self.name}/>"

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Attributes and body by name, in their order."""
        return {p.name: p for p in (*self.attributes, *([self.body] if self.body else []))}

    @property
    def properties(self) -> Mapping[str, Any]:
        """The JSON Schema of each argument."""
        properties: Mapping[str, Any] = _json_schema(self)["properties"]
        return properties

    def function(self) -> dict[str, Any]:
        """The tool as chat templates take it: type, name, description, JSON Schema of its arguments."""
        function = {"name": self.name, "description": self.about, "parameters": _json_schema(self)}
        return {"type": "function", "function": function}

    def complaint(self, arguments: Mapping[str, str]) -> str:
        """The reason for which a call with these arguments cannot run; empty when it can."""
        parameters = self.parameters
        for argument in arguments:
            if argument not in parameters:
                return f"{self.name}: no argument {argument}; there are {', '.join(parameters) or 'none'}"
        for parameter in parameters.values():
            if parameter.required and parameter.name not in arguments:
                return f"{self.name}: {parameter.name} is missing"
        return ""


@lru_cache(256)
def _json_schema(tool: ToolSchema) -> dict[str, Any]:
    """The tool's own, or that of a struct with one text field per parameter."""
    if tool.json:
        decoded: dict[str, Any] = msgspec.json.decode(tool.json)
        return decoded
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in sorted(tool.parameters.values(), key=lambda parameter: not parameter.required):
        text = Annotated[str, msgspec.Meta(description=parameter.about)]
        if parameter.required:
            fields.append((parameter.name, text))
        else:
            fields.append((parameter.name, text | msgspec.UnsetType, msgspec.UNSET))
    schema = msgspec.json.schema(msgspec.defstruct(tool.name, fields))
    (arguments,) = schema["$defs"].values()
    return {key: arguments[key] for key in ("type", "properties", "required")}


_PATH = Parameter("path", "path from the repository's root")

TABLE: tuple[ToolSchema, ...] = (
    ToolSchema(
        "search",
        "find a regular expression in the files; a hit on a definition shows all of it",
        (
            Parameter("query", "regular expression"),
            Parameter("glob", "only in files that match, such as src/*.py", required=False),
        ),
    ),
    ToolSchema(
        "read_file",
        "show a file with line numbers",
        (_PATH, Parameter("lines", "only these lines, such as 10-40", required=False)),
    ),
    ToolSchema("list_files", "list paths", (Parameter("glob", "pattern such as src/**/*.py", required=False),)),
    ToolSchema(
        "edit_file",
        "replace lines of a file by the text; lines 5-4 inserts before line 5",
        (_PATH, Parameter("lines", "line or range to replace, such as 7 or 7-9")),
        Parameter("text", "the new lines"),
    ),
    ToolSchema("write_file", "create or replace a file", (_PATH,), Parameter("text", "its whole content")),
    ToolSchema("run_tests", "run the tests", (Parameter("path", "only this test file", required=False),)),
    ToolSchema("terminal", "run a shell command", (), Parameter("command", "what sh -c runs")),
    ToolSchema("lint", "check files with the linter", (Parameter("glob", "which files", required=False),)),
    ToolSchema(
        "keyword_search", "rank pieces of the repository by a description", (Parameter("query", "words to look for"),)
    ),
    ToolSchema("finish", "end the task", (), Parameter("message", "a word to the user", required=False)),
)
"""Every tool that headrace knows, in the order in which a prompt lists them."""

BY_NAME: dict[str, ToolSchema] = {schema.name: schema for schema in TABLE}


def extended(tool: ToolSchema, *attributes: Parameter) -> ToolSchema:
    """A tool of `TABLE` with further optional arguments, which only chat formats show: the terse format's tags of such
    a tool are fixed ids of the tokenizers that exist."""
    return msgspec.structs.replace(tool, attributes=(*tool.attributes, *attributes))


def terse(tools: Sequence[ToolSchema]) -> tuple[ToolSchema, ...]:
    """The tools as the terse format has them: those of `TABLE` where it has the name."""
    return tuple(BY_NAME.get(tool.name, tool) for tool in tools)


TASK, TURN, RESULT, ERROR, SUMMARY = "task", "turn", "result", "error", "summary"


def functions_json(tools: Sequence[ToolSchema] = TABLE) -> dict[str, str]:
    """The JSON Schema of each tool as text, by name: nodes of a run have to agree on them."""
    return {tool.name: msgspec.json.encode(tool.function()).decode() for tool in tools}


def tags(tools: Sequence[ToolSchema] = TABLE) -> list[str]:
    """Every tag of the terse format, in a fixed order: the special tokens of a tokenizer trained for it."""
    tokens = ["<pad>"]
    for frame in (TASK, TURN, RESULT, ERROR, SUMMARY):
        tokens += [f"<{frame}>", f"</{frame}>"]
    tokens += ['"/>', '">']
    for tool in tools:
        if tool.attributes:
            tokens.append(tool.opening)
        if not any(a.required for a in tool.attributes) and (tool.body is None or not tool.body.required):
            tokens.append(tool.empty)
        if tool.body:
            tokens += [tool.closing, *([] if tool.attributes else [tool.opening])]
        tokens += [f'" {attribute.name}="' for attribute in tool.attributes[1:]]
    return list(dict.fromkeys(tokens))
