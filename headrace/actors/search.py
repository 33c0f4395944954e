"""The search actor: semantic search for the sandboxes of a run, by request and reply; one process per node.

A sandbox cannot hold the model, so the harness sends the files that changed since its last search, and this actor keeps
the index. A search waits for missing vectors for at most `[search] wait_s` and is a keyword search after that; the
reply names the mode.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from headrace.bus.broker.callers import callers
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.messages.search import Mode, SearchReply, SearchRequest, search_method
from headrace.messages.subjects import RPC, RPC_NODE, token
from headrace.search.index import Index
from headrace.search.models import INSTALL, SearchModelError, find, plugin
from headrace.search.service import open_indexes

REPLAY_S = 45.0
"""Seconds that a request with a fixed mode waits for vectors: less than the caller's time limit."""


class Search(Actor):
    """Serves SearchRequest."""

    role: ClassVar[str] = "search"

    async def start(self) -> None:
        """Find the model without loading it, then serve requests. SearchModelError without a usable one."""
        section = self.config.search
        self._answers = ThreadPoolExecutor(1, "answers")
        self._vectors = ThreadPoolExecutor(1, "vectors")
        model = find(section.model)
        if model is None:
            raise SearchModelError(
                f"the search actor has no model ([search] model = {section.model!r}): {INSTALL}, "
                "set [search] model to a folder, or leave the actor out of [processes] groups"
            )
        await agree(self.bus, self.run, [plugin(model, section.tokens)])
        self._indexes = open_indexes(model, section.tokens, Path(self.config.environment.cache_dir) / "search")
        self._work, self._news = asyncio.Event(), asyncio.Condition()
        self._searches = self._hybrid = 0
        self._unusable = ""
        """The reason for which the model cannot be used."""
        self._node = token(f"{self.bus.node}-{self.run}")
        self.spawn(self._embed(), "embedding")
        self.every(5.0, self._measure, "metrics")
        for caller in callers("search", "query"):
            own = RPC_NODE.at(service="search", caller=caller, node=self._node, method="query")
            await self.serve(own, self._query)
            shared = RPC.at(service="search", caller=caller, method=search_method(self._run_token))
            await self.serve(shared, self._query, queue="search")
        await self.event("search_ready", f"{model.folder.name} on {self._node}", model=self._indexes.identity)

    async def stop(self) -> None:
        """End the threads; a batch under way is finished."""
        self._answers.shutdown(wait=False, cancel_futures=True)
        self._vectors.shutdown(wait=False, cancel_futures=True)

    async def _query(self, request: SearchRequest) -> SearchReply:
        if token(request.run) != self._run_token:
            return SearchReply(node=self._node, failure="refused", detail=f"this actor serves run {self.run}")
        if request.model not in ("", self._indexes.identity):
            return SearchReply(node=self._node, failure="unknown_model", detail=request.model)
        loop = asyncio.get_running_loop()
        index = await loop.run_in_executor(self._answers, self._indexes.update, request)
        if index is None:
            return SearchReply(node=self._node, failure="unknown_base", detail=request.base)
        self._work.set()
        mode = await self._mode(index, request.mode)
        if mode is None:
            detail = self._unusable or f"no vectors within {REPLAY_S:.0f} s"
            return SearchReply(node=self._node, failure="not_ready", detail=detail)
        find = self._indexes.find
        try:
            reply = await loop.run_in_executor(self._answers, find, index, request.query, request.limit, mode)
        except SearchModelError as error:
            self._unusable = str(error)
            self.fail(error)
            return SearchReply(node=self._node, failure="not_ready", detail=self._unusable)
        self._searches += 1
        self._hybrid += mode == "hybrid"
        return SearchReply(
            node=self._node,
            root=reply.root,
            model=reply.model,
            mode=mode,
            hits=reply.hits,
            chunks=reply.chunks,
            left_out=reply.left_out,
        )

    async def _mode(self, index: Index, wanted: Mode | None) -> Mode | None:
        """The mode of an answer; None when the wanted mode is not available in time."""
        if wanted == "keyword":
            return wanted
        with self.waiting():
            try:
                async with asyncio.timeout(REPLAY_S if wanted else self.config.search.wait_s), self._news:
                    await self._news.wait_for(lambda: bool(self._unusable) or self._indexes.ready(index))
            except TimeoutError:
                return None if wanted else "keyword"
        return "hybrid" if not self._unusable else None

    async def _embed(self) -> None:
        """Embed missing chunks, a batch at a time, without end. Unrecoverable when the model cannot be used."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while await loop.run_in_executor(self._vectors, self._indexes.embed_some):
                    async with self._news:
                        self._news.notify_all()
            except SearchModelError as error:
                async with self._news:
                    self._unusable = str(error)
                    self._news.notify_all()
                raise

    async def _measure(self) -> None:
        self.status = f"{self._searches} searches, {len(self._indexes.vectors)} vectors"
        await self.metric(searches=self._searches, hybrid=self._hybrid, vectors=len(self._indexes.vectors))
