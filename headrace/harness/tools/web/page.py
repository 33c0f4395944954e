"""One GET request from within the sandbox, as the text of the answer.

The request is made by a program of the sandbox, so the task's list of destinations and its proxy decide what can be
reached, and each request is an event as any other of the sandbox.
"""

from headrace.harness.tools.base import Workspace
from headrace.messages.sandbox import Exec, OpResult

_FETCH = """
import html.parser, re, sys, urllib.error, urllib.request

class Text(html.parser.HTMLParser):
    HIDDEN = {"script", "style", "noscript", "template", "svg", "head"}
    BLOCK = {"p", "div", "br", "li", "tr", "pre", "table", "section", "article", "header", "footer", "nav", "hr",
             "ul", "ol", "dl", "dt", "dd", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"}

    def __init__(self):
        super().__init__()
        self.parts, self.hidden, self.pre = [], [], 0

    def handle_starttag(self, tag, attributes):
        if tag in self.HIDDEN:
            self.hidden.append(tag)
        self.pre += tag == "pre"
        if tag in self.BLOCK:
            self.parts.append("\\n")

    def handle_endtag(self, tag):
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag):]
        self.pre -= tag == "pre" and self.pre > 0
        if tag in self.BLOCK:
            self.parts.append("\\n")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\\s+", " ", data))

url, most, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    request = urllib.request.Request(url, headers={"User-Agent": "headrace", "Accept": "text/*, application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        data = answer.read(most)
        kind, charset = answer.headers.get_content_type(), answer.headers.get_content_charset() or "utf-8"
except urllib.error.HTTPError as error:
    sys.exit(f"{url} answered {error.code} {error.reason}")
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {getattr(error, 'reason', None) or error}")
try:
    text = data.decode(charset, "replace")
except LookupError:
    text = data.decode("utf-8", "replace")
if kind in ("text/html", "application/xhtml+xml"):
    parser = Text()
    parser.feed(text)
    parser.close()
    text = "".join(parser.parts)
    text = re.sub(r"[ \\t]*\\n[ \\t]*\\n\\s*", "\\n\\n", text).strip()
elif not (kind.startswith("text/") or re.search("json|xml|javascript|yaml", kind)):
    sys.exit(f"{url} is {kind}, not a text")
sys.stdout.buffer.write(text.encode("utf-8", "replace"))
"""
MOST_BYTES = 2 << 20
"""Bytes of an answer that are read."""
FETCH_S = 30.0
"""Seconds that a server may take for its next bytes; twice as many for the whole answer."""


async def fetched(workspace: Workspace, url: str) -> OpResult:
    """The answer's text in `stdout`; HTML without its tags. Not ok with the reason in `error`."""
    argv = ("python3", "-I", "-c", _FETCH, url, str(MOST_BYTES), str(FETCH_S))
    result = await workspace.call(Exec(argv=argv, timeout_s=2 * FETCH_S, output_cap=MOST_BYTES))
    if result.timed_out:
        return OpResult(ok=False, error=f"{url} took longer than {2 * FETCH_S:g} s")
    return result if result.ok else OpResult(ok=False, error=result.stderr.strip()[-500:] or result.error)
