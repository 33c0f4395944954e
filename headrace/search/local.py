"""Search services in this process: for replays and tests."""

import asyncio

from headrace.messages.search import SearchReply, SearchRequest
from headrace.search.service import Indexes


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
