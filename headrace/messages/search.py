"""Semantic search: a request about a workspace, the ranked chunks, what a trajectory records of them, and the adapter
of a query's vector as a version on the bus."""

from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.messages.base import Array, Count, Finite, Message, Share, message
from headrace.messages.operations import BlobRef
from headrace.messages.subjects import token

Mode = Literal["keyword", "hybrid"]
"""``keyword``: by words alone, while vectors are computed. ``hybrid``: by words and vectors."""


class Retrieved(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one search: with it a replay gives equal results, or says which chunk differs."""

    root: str
    """Hash of the files that were searched and of the rules by which they were cut into chunks."""
    model: str
    """Identity of the embedding model and its precision; of a hybrid search with an adapter also ``+`` and the hash of
    the adapter."""
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
    """As in `Retrieved`: without an adapter, or with that one. Empty: with the current adapter. A replay names the
    recorded one."""


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
    ``unknown_model``: the request names a model or adapter that is not used here."""
    detail: str = ""

    @property
    def retrieved(self) -> Retrieved:
        """The evidence of this reply."""
        chunks = tuple(hit.chunk for hit in self.hits)
        return Retrieved(root=self.root, model=self.model, mode=self.mode, chunks=chunks)


class SearchLost(Exception):
    """No search actor answers: a failure of the infrastructure, never of the policy."""


class Searcher(Protocol):
    """A search service: the actor of a node, or an index in this process."""

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply to a request. SearchLost when there is none."""


def search_method(run: str) -> str:
    """The method under which any search actor of a run answers; run: a token."""
    return f"query-{run}"


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """R@5 on one repository from which an adapter did not learn."""

    repository: str
    queries: Count
    plain: Share
    """Without the adapter."""
    adapted: Share
    """With it."""


class AdapterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How an adapter was learnt and what it gains. Gains are differences of R@5, as shares."""

    repositories: Count
    """From which it was learnt."""
    pairs: Count
    """Of a query and an edited function, from which it was learnt."""
    passes: Count
    losses: tuple[Finite, ...]
    """Before the first pass and after each, on repositories that only decide the number of passes."""
    held_out: tuple[HeldOut, ...]
    gain: Finite
    """Mean over the repositories held out."""
    low: Finite
    """Low end of its 95 % interval, a bootstrap over these repositories and the queries of each."""
    high: Finite


@message("search_adapter")
class SearchAdapter(Message, frozen=True, kw_only=True, dict=True):
    """A linear map of a query's vector, learnt from traces: vector v becomes v + vM, scaled to length 1. Vectors of
    chunks stay as they are."""

    model: str
    """Identity of the embedding model that it belongs to, as in `Retrieved`."""
    matrix: Array
    """<u2 [width, width]: M, the bits of float16."""
    figures: AdapterFigures

    @cached_property
    def hash(self) -> str:
        """The version's name: blake2b-128 over the model, a zero byte and the bytes of the matrix. Two adapters of one
        name give equal results."""
        return blake2b(self.model.encode() + b"\0" + self.matrix.data, digest_size=16).hexdigest()


@message("search_adapter_version")
class SearchAdapterVersion(Message, frozen=True, kw_only=True):
    """A published adapter: a value in HR_ADAPTERS under ``search.<run>.<hash>``. Of the versions of a run that are not
    withdrawn the one written last is in use."""

    run: str
    hash: str
    """blake2b-128 over the adapter's model, a zero byte and the bytes of its matrix, as hexadecimal digits."""
    blob: BlobRef
    """Where the SearchAdapter is."""
    withdrawn: bool = False
    """No search uses it any more; replays still read it."""


def adapter_key(run: str, hash: str = "*") -> str:
    """Key of a SearchAdapterVersion in HR_ADAPTERS; without a hash a filter of all versions of the run."""
    return f"search.{token(run)}.{hash}"
