"""What a rollout actor's SGLang server does, said on the bus: its figures, its deaths, and the requests of others.

Figures go out as a metric, a server that was lost or started again as an event. The requests of others go out as
Traffic, the scavenger's second source: a gateway knows the sessions that came through it, but a product that also calls
the server directly shows only in the server's own figures, and only the actor in front of it knows where they are.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.engines.base import Engine, EngineError
from headrace.engines.sglang import SglangEngine
from headrace.messages import subjects
from headrace.messages.product import Traffic

EVERY_S = 1.0
EVENTS = {"lost": "server_lost", "starts": "server_started", "reloads": "version_reloaded"}
"""A counter of the engine that grew, and what is said then."""


class ServerWord:
    """The word of one rollout actor about its server; nothing at all for other engines."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        rollout: str,
        event: Callable[..., Awaitable[None]],
        metric: Callable[..., Awaitable[None]],
    ) -> None:
        """event, metric: the actor's own."""
        self._bus, self._rollout, self._event, self._metric = bus, rollout, event, metric
        self._region, self._run, self._capacity = config.bus.region, config.run.id, config.engine.max_batch
        self._shared = config.production.enabled and rollout in config.production.rollouts
        self._said = dict.fromkeys(EVENTS, 0.0)
        self._done = (0, time.monotonic())

    async def say(self, engine: Engine | None) -> None:
        """Once a second."""
        if not isinstance(engine, SglangEngine):
            return
        stats: dict[str, Any] = engine.stats()
        for name, kind in EVENTS.items():
            if stats[name] > self._said[name]:
                self._said[name] = stats[name]
                await self._event(kind, f"{name}: {stats[name]:.0f} so far", "info" if name == "starts" else "warning")
        await self._metric(**{f"server_{name}": float(value) for name, value in stats.items()})
        if self._shared:
            await self._traffic(engine)

    async def _traffic(self, engine: SglangEngine) -> None:
        """Nothing is said of a server that is gone, starts, or can't tell whose its requests are."""
        try:
            found = await engine.outside()
        except EngineError:
            return
        if found is None:
            return
        now, (before, then) = time.monotonic(), self._done
        self._done = (found.done, now)
        traffic = Traffic(
            region=self._region,
            run=self._run,
            server=self._rollout,
            active=found.running,
            waiting=found.queued,
            requests_per_s=max(0, found.done - before) / max(now - then, 1e-3),
            capacity=self._capacity,
        )
        await self._bus.emit(subjects.TRAFFIC.at(region=subjects.token(self._region)), traffic)
