"""web_search: asks the search service that the task or `[tools] web_search` names.

The service answers in JSON: an object whose `results` are objects with `url`, `title` and `content`. SearXNG does so.
"""

from urllib.parse import quote

import msgspec

from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace, failed
from headrace.harness.tools.web.page import fetched

_SHOWN, _LONGEST = 8, 300
MOST_QUERY = 500
"""Characters of a query."""


class Hit(msgspec.Struct, frozen=True):
    """One result of the service."""

    url: str
    title: str = ""
    content: str | None = ""


class _Hits(msgspec.Struct, frozen=True):
    results: list[Hit]


class WebSearchTool:
    """Searches the web."""

    schema = ToolSchema(
        "web_search", "search the web; shows title, address and summary", (Parameter("query", "what to look for"),)
    )
    writes = False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The first results, or why there are none."""
        query = arguments["query"].strip()
        if not query or len(query) > MOST_QUERY:
            return Answer(f"query: expected 1 to {MOST_QUERY} characters, got {len(query)}", ok=False)
        result = await fetched(workspace, str(workspace.task.web_search).replace("{query}", quote(query, safe="")))
        if not result.ok:
            return failed(result)
        try:
            hits = msgspec.json.decode(result.stdout, type=_Hits).results
        except (msgspec.DecodeError, RecursionError):
            return Answer("the search service did not answer with a list of results", ok=False)
        shown = [f"{_line(hit.title)}\n{_line(hit.url)}\n{_line(hit.content or '')}".rstrip() for hit in hits[:_SHOWN]]
        return Answer("\n\n".join(shown) or "nothing found")


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


TOOL = WebSearchTool()
