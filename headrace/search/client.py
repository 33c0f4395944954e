"""Asks the search actors of a run: any of them first, then the one that answered, because it holds the index."""

import time

from headrace.backoff import Backoff
from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.base import Message
from headrace.messages.search import SearchLost, SearchReply, SearchRequest, search_method
from headrace.messages.subjects import RPC, RPC_NODE, token

ANSWER_S = 60.0
"""How long a request waits for its answer."""
SILENCE_S = 30.0
"""How long an actor may be away until its supervisor has restarted it."""


class SearchClient:
    """The Searcher of a rollout actor."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._run, self._node = bus, token(run), ""

    async def ask(self, request: SearchRequest) -> SearchReply:
        """The reply. SearchLost when no actor answers within `SILENCE_S`."""
        waits = Backoff(0.2, 2.0, jitter=0.3)
        deadline = time.monotonic() + SILENCE_S
        while True:
            try:
                reply = await self._bus.request(self._subject(), request, timeout=ANSWER_S)
            except (NoResponders, BusTimeout, Disconnected) as error:
                self._node = ""
                if time.monotonic() > deadline:
                    raise SearchLost(f"no search actor answers: {error}") from None
                await waits.sleep()
                continue
            return self._taken(reply)

    def _taken(self, reply: Message) -> SearchReply:
        if not isinstance(reply, SearchReply):
            raise SearchLost(f"the search actor failed: {getattr(reply, 'detail', type(reply).__name__)}")
        self._node = reply.node
        return reply

    def _subject(self) -> str:
        if self._node:
            return RPC_NODE.at(service="search", caller=self._bus.role, node=self._node, method="query")
        return RPC.at(service="search", caller=self._bus.role, method=search_method(self._run))
