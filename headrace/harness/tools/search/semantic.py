"""semantic_search: parts of the repository ranked by meaning and words, from an index of the present workspace.

The node's search actor holds the index (headrace/search). In a run without an embedding model a task offers
keyword_search instead, under that name, so a policy always knows which search answered.
"""

from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace, numbered
from headrace.harness.tools.search.session import UnsearchableWorkspace
from headrace.messages.search import SearchLost

NAME = "semantic_search"
_SHOWN, _LINES = 5, 12
MOST_QUERY = 2000
"""Characters of a query; each of its words is looked up in every piece."""


class SemanticSearchTool:
    """Pieces of the repository that fit a description."""

    schema = ToolSchema(
        NAME,
        "find code by what it does; shows the pieces of the repository that fit a description best",
        (Parameter("query", "what the code does, in plain words"),),
    )
    writes = False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The best pieces, each with its path and line numbers."""
        if workspace.search is None:
            raise SearchLost("this episode has no search service, but its task offers semantic_search")
        if not arguments["query"].strip():
            return Answer("query is empty", ok=False)
        if len(arguments["query"]) > MOST_QUERY:
            return Answer(f"query has {len(arguments['query'])} characters; at most {MOST_QUERY} are allowed", ok=False)
        try:
            reply = await workspace.search.find(arguments["query"], _SHOWN, workspace.call, workspace.call_id)
        except UnsearchableWorkspace as error:
            return Answer(str(error), ok=False)
        shown = [
            f"{hit.path}\n{numbered(list(hit.lines[:_LINES]), hit.first)}".rstrip()
            + (f"\n[{len(hit.lines) - _LINES} more lines]" if len(hit.lines) > _LINES else "")
            for hit in reply.hits
        ]
        if reply.left_out:
            files = "1 file is" if reply.left_out == 1 else f"{reply.left_out} files are"
            shown.append(
                f"[{files} not searched: the repository is too large to index, so only the first files by path are]"
            )
        return Answer("\n".join(shown) or "nothing found", retrieved=reply.retrieved)


TOOL = SemanticSearchTool()
