"""search: lines that match a regular expression. A hit on a definition shows up to `_BODY` lines of its body.

A policy nearly always needs the place and the content together, so one call returns both.
"""

import re

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Search
from headrace.rendering.schemas import BY_NAME

_LINE = re.compile(r"([^\n]+?)([:-])(\d+)\2(.*)")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\b")
_BODY = 40
"""Most lines of a definition that are shown."""


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def layout(stdout: str) -> str:
    """Search output by file: the path on its own line, then ``line:text`` of the hits and of the bodies they begin.

    stdout: ``path:line:text`` for a hit, ``path-line-text`` for a line of context.
    """
    shown: list[str] = []
    current, inside, named = "", -1, False
    for raw in stdout.splitlines():
        match = _LINE.fullmatch(raw)
        if match is None:
            continue
        path, mark, line, text = match.groups()
        if path != current:
            current, inside, named = path, -1, False
        if inside >= 0 and text.strip() and _indent(text) <= inside:
            inside = -1
        if mark == ":":
            if inside < 0 and _DEFINITION.match(text):
                inside = _indent(text)
        elif inside < 0 or not text.strip():
            continue
        if not named:
            shown.append(path)
            named = True
        shown.append(f"{line}:{text}")
    return "\n".join(shown)


class SearchTool:
    """Lines that match a regular expression."""

    schema, writes = BY_NAME["search"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Hits by file, or that there are none."""
        if not arguments["query"]:
            return Answer("query is empty", ok=False)
        op = Search(pattern=arguments["query"], glob=arguments.get("glob", "**"), context=_BODY, limit=20)
        result = await workspace.call(op)
        if not result.ok:
            return failed(result)
        return Answer(layout(result.stdout) or "nothing found")


TOOL = SearchTool()
