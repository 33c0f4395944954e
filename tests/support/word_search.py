"""A search service in this process without a model."""

from headrace.messages.search import SearchReply, SearchRequest
from headrace.search.service import Embedder, Indexes


class WordSearcher:
    """Answers by words alone, without a model and without suspending."""

    def __init__(self) -> None:
        self.indexes = Indexes("words", _no_model, 1, None)

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply in the mode `keyword`."""
        index = self.indexes.update(request)
        assert index is not None, "a test sends the whole workspace with every search"
        return self.indexes.find(index, request.query, request.limit, "keyword")


def _no_model() -> Embedder:
    raise AssertionError("a search by words needs no model")
