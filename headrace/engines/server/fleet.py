"""Several servers as one engine: each has devices and a port of its own, and a link to the version.

Idea: a node has more GPUs than one server of a small model needs. A session stays on the server that has its prefix
cached; a new one goes to the live server with the fewest sessions. A version is `latest` when all live servers have it:
if one refuses it, the others load the version before it again, so that all servers always serve one version.

A server that is lost gets no sessions. Its turns are sampled on another server, which forwards their context again, so
their spans begin at position 0. In the background it is started again and loads the node's version; then it gets
sessions. When all are lost, a turn waits until its server is started again, as with one server.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from headrace.backoff import Backoff
from headrace.engines.base import EngineError, RefusedVersion, Sample, SampleRequest, Swap, UnusableEngine
from headrace.engines.server.backend import Requests
from headrace.engines.server.engine import OneServer, ServerLost
from headrace.engines.server.weights.checksums import Expectations
from headrace.engines.server.weights.staging import Verified

T = TypeVar("T")
LARGEST = ("pause_ms", "stage_ms", "kv_usage", "cache_hit_rate")
"""Figures of which the largest server's counts; the others are added."""
SMALLEST = ("checked",)
AGAIN_S = (1.0, 60.0)
"""The first and the largest delay in seconds before a lost server is tried again."""
_log = logging.getLogger("headrace.engines.server")


class Fleet:
    """An `engines.base.ServerEngine` over several engines of one server each, which serve the same versions."""

    def __init__(self, engines: Sequence[OneServer]) -> None:
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
        self._out: dict[int, asyncio.Task[None]] = {}
        """The servers that get no sessions, and the tasks that bring them back."""
        self._losses = self._returns = 0
        self._stopped = False
        shared = Expectations(), Verified()
        for index, engine in enumerate(engines):
            lost = partial(self._lose, index, "it ended or does not answer")
            engine.join(partial(self._elsewhere, index), lost, *shared)

    @property
    def fingerprint(self) -> str:
        """That of the first server that was started; all are started with the same arguments."""
        return next((engine.fingerprint for engine in self.engines if engine.fingerprint), "")

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""
        return self._before[0] if self._before is not None else -1

    def stats(self) -> dict[str, float]:
        """The figures of `OneServer.stats` over all servers, their number, and that of lost ones. `returns` counts
        servers that serve the node's version again."""
        parts = [engine.stats() for engine in self.engines]
        out: dict[str, float] = {"servers": len(parts)}
        for name in parts[0]:
            values = [part[name] for part in parts]
            out[name] = max(values) if name in LARGEST else min(values) if name in SMALLEST else sum(values)
        return out | {"out": len(self._out), "losses": self._losses, "returns": self._returns}

    async def outside(self) -> Requests | None:
        """Requests of other clients in all live servers; None when one cannot tell them apart. ServerError."""
        parts = await asyncio.gather(*(self.engines[index].outside() for index in self._live() or self._all()))
        requests = [part for part in parts if part is not None]
        if len(requests) < len(parts):
            return None
        return Requests(*(sum(values) for values in zip(*requests, strict=True)))

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Serve a version as `latest` on all live servers, or on all when none is live; the pause is the longest one. A
        server that is lost meanwhile loads it when it is back. EngineError when one refuses the version, which is then
        on none, or when no server is left; the version before it is then `latest`."""
        async with self._loading:
            asked = [index for index in self._all() if self._before is None or index in self._live()] or self._all()
            done = dict(zip(asked, await self._each(asked, lambda e: e.load(version, path, state_hash)), strict=True))
            errors = {index: result for index, result in done.items() if isinstance(result, BaseException)}
            loaded = {index: result for index, result in done.items() if isinstance(result, Swap)}
            refusal = next((error for index, error in errors.items() if _refuses(error, self.engines[index])), None)
            if refusal is not None or not loaded:
                await self._go_back(list(loaded))
                raise refusal or next(iter(errors.values()))
            self._before = version, path, state_hash
            for index in self._all():
                if not self.engines[index].has(version, state_hash):
                    self._lose(index, str(errors.get(index, "it did not get the newest version")))
            pause = max(result.pause_ms for result in loaded.values())
            return Swap(version=version, state_hash=state_hash, pause_ms=pause)

    async def _go_back(self, servers: Sequence[int]) -> None:
        """Make the version before `latest` again on servers that have the new one; one that cannot is lost."""
        before = self._before
        if before is not None:
            done = await self._each(servers, lambda engine: engine.load(*before))
            for index, result in zip(servers, done, strict=True):
                if isinstance(result, BaseException):
                    self._lose(index, str(result))

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Hold a version for requests that name it, on all servers."""
        for engine in self.engines:
            await engine.pin(version, path, state_hash)

    async def unpin(self, version: int) -> None:
        """Release a pinned version."""
        for engine in self.engines:
            await engine.unpin(version)

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one generation on the session's server, or on another one when that is lost. EngineError as of
        `OneServer.sample`."""
        for _ in self.engines:
            home = await self._home(request.session)
            try:
                return await self.engines[home].sample(request)
            except ServerLost as error:
                self._lose(home, str(error))
            finally:
                if not request.session:
                    self._sessions[home] -= 1
        raise EngineError(f"{len(self.engines)} servers were lost during one turn")

    async def close(self, session: str) -> None:
        """Forget a session."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1
            await self.engines[home].close(session)

    async def stop(self) -> None:
        """End all engines and their servers. The first error is raised after all have ended."""
        self._stopped = True
        for task in self._out.values():
            task.cancel()
        for result in await self._each(self._all(), lambda engine: engine.stop()):
            if isinstance(result, BaseException):
                raise result

    # Internal methods.

    def _all(self) -> list[int]:
        return list(range(len(self.engines)))

    def _live(self) -> list[int]:
        """The servers that get sessions."""
        return [index for index, engine in enumerate(self.engines) if index not in self._out and engine.serves]

    def _elsewhere(self, index: int) -> bool:
        """Whether a server other than this one is live."""
        return any(other != index for other in self._live())

    async def _home(self, session: str) -> int:
        """The server that samples a session's next turn; counts a new session, or a request without one."""
        # When all are lost, a turn waits for a server that restarts with the node's version.
        newest = [index for index, engine in enumerate(self.engines) if engine.version == self.version]
        usable = self._live() or newest or self._all()
        home = self._homes.get(session)
        if home in usable:
            return home
        if home is not None:
            await self.close(session)
        home = min(usable, key=self._sessions.__getitem__)
        self._sessions[home] += 1
        if session:
            self._homes[session] = home
        return home

    def _lose(self, index: int, why: str) -> None:
        """Give a server no more sessions until it serves the node's version again. Does nothing when it is lost
        already, before the first version, and after `stop`."""
        if index not in self._out and self._before is not None and not self._stopped:
            self._losses += 1
            _log.warning("server %d of %d is lost, the others take its sessions: %s", index, len(self.engines), why)
            self._out[index] = asyncio.create_task(self._bring_back(index), name=f"server {index} is brought back")

    async def _bring_back(self, index: int) -> None:
        """Start a lost server again and load the node's version."""
        engine, retry = self.engines[index], Backoff(*AGAIN_S)
        while (before := self._before) is not None and not engine.has(before[0], before[2]):
            try:
                await engine.load(*before)
            except EngineError as error:
                _log.warning("server %d does not serve version %d yet: %s", index, before[0], error)
                await retry.sleep()
            except UnusableEngine as error:
                _log.error("server %d cannot be used and stays out until the actor is started again: %s", index, error)
                return
        del self._out[index]
        self._returns += 1

    async def _each(self, servers: Sequence[int], call: Callable[[OneServer], Awaitable[T]]) -> list[T | BaseException]:
        """Results or errors of servers, at the same time."""
        return await asyncio.gather(*(call(self.engines[index]) for index in servers), return_exceptions=True)


def _refuses(error: BaseException, engine: OneServer) -> bool:
    """Whether a failed load is the version's fault and not the loss of the server."""
    return engine.serves or isinstance(error, RefusedVersion) or not isinstance(error, EngineError)
