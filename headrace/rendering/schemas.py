"""The tools as the policy writes them: names, attributes, bodies; and the tags that this spelling is made of.

    <search query="mean" glob="*.py"/>
    <edit_file path="kit/core.py" lines="4-5">    return total / count</edit_file>

One attribute per parameter in the table's order; one parameter may be the body, taken verbatim between the tags,
because code in an attribute would need quoting. Attribute values escape ``& " < >`` as XML does; a body escapes
only its own closing tag. The tags are cut so that a tokenizer can give each one id: ``<edit_file path="``, ``"
lines="``, ``">``.
"""

from collections.abc import Sequence

import msgspec


class Parameter(msgspec.Struct, frozen=True):
    """One argument of a tool."""

    name: str
    about: str
    required: bool = True


class ToolSchema(msgspec.Struct, frozen=True):
    """One tool. The first attribute, when there is one, is part of the opening tag, so it comes first."""

    name: str
    about: str
    attributes: tuple[Parameter, ...] = ()
    body: Parameter | None = None

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
    ToolSchema("lint", "check Python files for errors", (Parameter("glob", "which files", required=False),)),
    ToolSchema(
        "semantic_search", "rank pieces of the repository by a description", (Parameter("query", "words to look for"),)
    ),
    ToolSchema("finish", "end the task", (), Parameter("message", "a word to the user", required=False)),
)
"""Every tool that headrace knows, in the order in which a prompt lists them."""

BY_NAME: dict[str, ToolSchema] = {schema.name: schema for schema in TABLE}

TASK, TURN, RESULT, ERROR, SUMMARY = "task", "turn", "result", "error", "summary"


def tags(tools: Sequence[ToolSchema] = TABLE) -> list[str]:
    """Every tag of the terse format, in a fixed order: the special tokens of a tokenizer trained for it."""
    found = ["<pad>"]
    for frame in (TASK, TURN, RESULT, ERROR, SUMMARY):
        found += [f"<{frame}>", f"</{frame}>"]
    found += ['"/>', '">']
    for tool in tools:
        if tool.attributes:
            found.append(tool.opening)
        if not any(a.required for a in tool.attributes) and (tool.body is None or not tool.body.required):
            found.append(tool.empty)
        if tool.body:
            found += [tool.closing, *([] if tool.attributes else [tool.opening])]
        found += [f'" {attribute.name}="' for attribute in tool.attributes[1:]]
    return list(dict.fromkeys(found))
