"""web_fetch: a page as text, or some of its lines."""

from urllib.parse import urlsplit

from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace, failed, number_range
from headrace.harness.tools.web.page import fetched


class WebFetchTool:
    """Reads one address."""

    schema = ToolSchema(
        "web_fetch",
        "read a page of the web as text",
        (
            Parameter("url", "its address, with http:// or https://"),
            Parameter("lines", "only these lines of the text, such as 200-300", required=False),
        ),
    )
    writes = False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The text, or why the page cannot be read."""
        url = arguments["url"].strip()
        wanted = number_range(arguments["lines"]) if "lines" in arguments else (1, 1 << 30)
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        if not _is_address(url):
            return Answer(f"url: expected an address such as https://docs.python.org/3/, got {url[:80]!r}", ok=False)
        result = await fetched(workspace, url)
        if not result.ok:
            return failed(result)
        lines = result.stdout.split("\n")
        first, last = max(1, wanted[0]), wanted[1]
        if first > len(lines):
            return Answer(f"the text has {len(lines)} lines", ok=False)
        return Answer("\n".join(lines[first - 1 : last]).strip("\n") or "the page has no text")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        return False


TOOL = WebFetchTool()
