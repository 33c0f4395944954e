"""keyword_search: parts of the repository ranked by a description, with BM25 over the words of identifiers.

It needs no model, so it works for every policy on every node; a description that shares no word with the code finds
nothing. A part is a top-level definition, or the lines between two definitions. `search.keywords` has the formula.
"""

import itertools
import re

import numpy as np

from headrace.harness.tools.base import Answer, Workspace, failed, numbered
from headrace.messages.sandbox import PullTree
from headrace.rendering.schemas import BY_NAME
from headrace.search import keywords
from headrace.vmhost.guest.lines import shown_lines

_START = re.compile(r"(?:@|async\s+def|def|class)\b|@")
_SHOWN, _LINES = 3, 12


def pieces(path: str, lines: list[str]) -> list[tuple[str, int, list[str]]]:
    """(path, first line, lines) of each top-level definition and of the text between two definitions."""
    starts = [i for i, line in enumerate(lines) if _START.match(line) and not (i and lines[i - 1].startswith("@"))]
    cuts = sorted({0, *starts, len(lines)})
    return [(path, a + 1, lines[a:b]) for a, b in itertools.pairwise(cuts) if any(map(str.strip, lines[a:b]))]


def rank(query: str, documents: list[tuple[str, int, list[str]]]) -> list[tuple[float, int]]:
    """(score, index) of the documents that share a word with the query, best first, ties in their order."""
    bags = [keywords.Bag(" ".join([path, *lines])) for path, _, lines in documents]
    lengths = np.array([bag.length for bag in bags], float)
    scores = keywords.scores(query, [(0, keywords.postings_of(query, bags))], lengths)
    found = [(float(score), index) for index, score in enumerate(scores) if score > 0]
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


class KeywordSearchTool:
    """Pieces of the repository that fit a description."""

    schema, writes = BY_NAME["keyword_search"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The best pieces, each with its path and line numbers."""
        result = await workspace.call(PullTree(patterns=("**/*.py", "*.py", "**/*.md", "*.md"), limit=4 << 20))
        if not result.ok:
            return failed(result)
        documents = [piece for path in sorted(result.files) for piece in pieces(path, shown_lines(result.files[path]))]
        best = rank(arguments["query"], documents)[:_SHOWN]
        shown = [
            f"{path}\n{numbered([line for line in lines[:_LINES]], first)}".rstrip()
            for path, first, lines in (documents[index] for _, index in best)
        ]
        return Answer("\n".join(shown) or "nothing found")


TOOL = KeywordSearchTool()
