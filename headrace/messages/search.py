"""Semantic search: a request about a workspace, the ranked chunks, and what a trajectory records of them."""

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.errors import HeadraceError
from headrace.messages.base import Count, Finite, Message, message

Mode = Literal["keyword", "hybrid"]
"""``keyword``: by words alone, while vectors are computed. ``hybrid``: by words and vectors."""


class Retrieved(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one search: with it a replay gives equal results, or says which chunk differs."""

    root: str
    """Hash of the files that were searched and of the rules by which they were cut into chunks."""
    model: str
    """Identity of the embedding model and its precision."""
    mode: Mode
    chunks: tuple[str, ...]
    """Hashes of the chunks in the result, in their order."""


class Hit(msgspec.Struct, frozen=True):
    """One chunk of a result."""

    path: str
    first: Count
    """The number of its first line."""
    lines: tuple[str, ...]
    chunk: str
    score: Finite


@message("search_request")
class SearchRequest(Message, frozen=True, kw_only=True):
    """Rank the chunks of a workspace: the one whose root is `base`, with `files` in place of its own and without
    `deleted`. An empty base is an empty workspace."""

    run: str
    template: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")]
    """Name of the workspace's origin; vectors are cached by it, in a file of this name."""
    base: str = ""
    files: dict[str, bytes] = {}
    deleted: tuple[str, ...] = ()
    query: str
    limit: Count = 5
    mode: Mode | None = None
    """None: hybrid if all vectors are there within a moment. A replay names the recorded one."""
    model: str = ""
    """As in `Retrieved`; a replay names the recorded one. Empty: that of the answering node."""


@message("search_reply")
class SearchReply(Message, frozen=True, kw_only=True):
    """The ranked chunks, or why there are none."""

    node: str = ""
    root: str = ""
    model: str = ""
    mode: Mode = "keyword"
    hits: tuple[Hit, ...] = ()
    chunks: Count = 0
    """Chunks of the workspace."""
    left_out: Count = 0
    """Files that are not searched, because indexing all files costs too much work."""
    failure: str = ""
    """``unknown_base``: send the whole workspace. ``not_ready``: the vectors were not there in time.
    ``unknown_model``: the request names a model that is not used here."""
    detail: str = ""

    @property
    def retrieved(self) -> Retrieved:
        """The evidence of this reply."""
        chunks = tuple(hit.chunk for hit in self.hits)
        return Retrieved(root=self.root, model=self.model, mode=self.mode, chunks=chunks)


class SearchLost(HeadraceError):
    """No search actor answers: a failure of the infrastructure, never of the policy."""


class Searcher(Protocol):
    """A search service: the actor of a node, or an index in this process."""

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply to a request. SearchLost when there is none."""


def search_method(run: str) -> str:
    """The method under which any search actor of a run answers; run: a token."""
    return f"query-{run}"
