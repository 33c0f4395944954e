"""search: lines that match a regular expression; a hit on a definition shows the definition's whole body.

Place and content are nearly always asked for together, so one call answers both.
"""

import re

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Search
from headrace.rendering.schemas import BY_NAME

_LINE = re.compile(r"([^\n]+?)([:-])(\d+)\2(.*)")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\b")
_BODY = 40
"""Lines of a definition that are shown at most."""


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def layout(stdout: str) -> str:
    """Search output (``path:line:text`` for hits, ``path-line-text`` around them) as a path on a line of its own, then
    ``line:text`` of the hits and of the bodies that they open."""
    shown: list[str] = []
    current, inside, named = "", -1, False
    for raw in stdout.splitlines():
        found = _LINE.fullmatch(raw)
        if found is None:
            continue
        path, mark, line, text = found.groups()
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
