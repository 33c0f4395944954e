"""Search services in this process: for replays, tests and traces."""

import asyncio

from headrace.messages.search import SearchReply, SearchRequest
from headrace.search.service import Embedder, Indexes


class LocalSearcher:
    """Answers requests from its own indexes; it waits until all vectors are computed."""

    def __init__(self, indexes: Indexes) -> None:
        self._indexes = indexes

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply; hybrid unless the request names another mode."""
        return await asyncio.to_thread(self.answer, request)

    def answer(self, request: SearchRequest) -> SearchReply:
        """`ask` for callers without an event loop."""
        indexes = self._indexes
        if request.model not in ("", indexes.identity):
            return SearchReply(failure="unknown_model", detail=request.model)
        index = indexes.update(request)
        if index is None:
            return SearchReply(failure="unknown_base", detail=request.base)
        mode = request.mode or "hybrid"
        while mode == "hybrid" and not indexes.ready(index):
            indexes.embed_some()
        return indexes.find(index, request.query, request.limit, mode)


class WordSearcher:
    """Answers by words alone, without a model and without suspending: for the results in generated traces."""

    def __init__(self) -> None:
        self._indexes = Indexes("words", _no_model, 1, None)

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply in the mode `keyword`."""
        index = self._indexes.update(request)
        assert index is not None, "a trace sends the whole workspace with every search"
        return self._indexes.find(index, request.query, request.limit, "keyword")


def _no_model() -> Embedder:
    raise AssertionError("a search by words needs no model")
