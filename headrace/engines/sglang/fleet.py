"""Several servers as one engine: each has devices, a port and a staged checkpoint of its own.

Idea: a node has more GPUs than one server of a small model needs. A session stays on the server that has its prefix
cached; a new one goes to the server with the fewest sessions. A version is `latest` when all servers have it: if one
refuses it, the others load the version before it again, so that all servers always serve one version.

Trade-off: the node's memory holds one staged checkpoint per server, because each server may be changed or started again
at its own time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.metrics import Requests

T = TypeVar("T")
LARGEST = ("pause_ms", "stage_ms", "kv_usage", "cache_hit_rate")
"""Figures of which the largest server's counts; the others are added."""
SMALLEST = ("checked",)
STATES: tuple[Literal["down", "paused", "serving"], ...] = ("down", "paused", "serving")
"""States of a server, the worst first."""


class Fleet:
    """An `engines.base.ServerEngine` over several engines of one server each, which serve the same versions."""

    def __init__(self, engines: Sequence[SglangEngine]) -> None:
        """engines: at least one, before their first load. EngineError otherwise."""
        if not engines:
            raise EngineError("expected at least one server")
        self.engines = tuple(engines)
        self._homes: dict[str, int] = {}
        """Session to the index of its server."""
        self._sessions = [0] * len(engines)
        """Number of sessions by server; a request without a session counts while it runs."""
        self._before: tuple[int, str, str] | None = None
        self._loading = asyncio.Lock()

    @property
    def fingerprint(self) -> str:
        """That of the first server; all are started with the same arguments."""
        return self.engines[0].fingerprint

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""
        return self._before[0] if self._before is not None else -1

    def stats(self) -> dict[str, float]:
        """The figures of `SglangEngine.stats` over all servers, and their number."""
        parts = [engine.stats() for engine in self.engines]
        out: dict[str, float] = {"servers": len(parts)}
        for name in parts[0]:
            values = [part[name] for part in parts]
            out[name] = max(values) if name in LARGEST else min(values) if name in SMALLEST else sum(values)
        return out

    async def health(self) -> Literal["serving", "paused", "down"]:
        """The worst state of a server."""
        states = await asyncio.gather(*(engine.health() for engine in self.engines))
        return min(states, key=STATES.index)

    async def outside(self) -> Requests | None:
        """Requests of other clients in all servers; None when one cannot tell them apart. ServerError."""
        parts = await asyncio.gather(*(engine.outside() for engine in self.engines))
        requests = [part for part in parts if part is not None]
        if len(requests) < len(parts):
            return None
        return Requests(*(sum(values) for values in zip(*requests, strict=True)))

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Serve a version as `latest` on all servers; the pause is the longest one. EngineError when one refuses it;
        the version before it is then `latest` on all."""
        async with self._loading:
            done = await self._each(lambda engine: engine.load(version, path, state_hash))
            errors = [result for result in done if isinstance(result, BaseException)]
            if errors:
                await self._go_back([index for index, result in enumerate(done) if isinstance(result, Swap)])
                raise errors[0]
            self._before = version, path, state_hash
            pause = max(result.pause_ms for result in done if isinstance(result, Swap))
            return Swap(version=version, state_hash=state_hash, pause_ms=pause)

    async def _go_back(self, servers: Sequence[int]) -> None:
        """Make the version before `latest` again on servers that have the new one. EngineError."""
        before = self._before
        if before is not None and servers:
            done = await asyncio.gather(
                *(self.engines[index].load(*before) for index in servers), return_exceptions=True
            )
            for result in done:
                if isinstance(result, BaseException):
                    raise result

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Hold a version for requests that name it, on all servers."""
        for engine in self.engines:
            await engine.pin(version, path, state_hash)

    async def unpin(self, version: int) -> None:
        """Release a pinned version."""
        for engine in self.engines:
            await engine.unpin(version)

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one generation on the session's server. EngineError as of `SglangEngine.sample`."""
        home = self._homes.get(request.session)
        fresh = home is None
        if home is None:
            home = min(range(len(self.engines)), key=self._sessions.__getitem__)
            self._sessions[home] += 1
            if request.session:
                self._homes[request.session] = home
        try:
            return await self.engines[home].sample(request)
        finally:
            if fresh and not request.session:
                self._sessions[home] -= 1

    async def close(self, session: str) -> None:
        """Forget a session."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1
            await self.engines[home].close(session)

    async def stop(self) -> None:
        """End all engines and their servers. The first error is raised after all have ended."""
        for result in await self._each(lambda engine: engine.stop()):
            if isinstance(result, BaseException):
                raise result

    async def _each(self, call: Callable[[SglangEngine], Awaitable[T]]) -> list[T | BaseException]:
        """Results or errors of all servers, at the same time."""
        return await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
