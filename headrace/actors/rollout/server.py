"""Reports on a rollout actor's SGLang server: its metrics, its restarts, and the requests of other clients.

Metrics are published as a Metric, and a lost or restarted server as an event. The requests of other clients are
published as Traffic, the scavenger's second source: a gateway counts only the sessions that it opened, and requests
that a product sends directly to the server appear only in the server's metrics, which this actor reads.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.engines.base import Engine, EngineError, ServerEngine
from headrace.messages import subjects
from headrace.messages.product import Traffic

EVERY_S = 1.0
EVENTS = {"lost": "server_lost", "starts": "server_started", "reloads": "version_reloaded"}
"""Counters of the engine, and the event that an increase causes."""


class ServerReports:
    """Reports on the SGLang server of one rollout actor; publishes nothing for an engine without a server."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        rollout: str,
        event: Callable[..., Awaitable[None]],
        metric: Callable[..., Awaitable[None]],
    ) -> None:
        """event, metric: the methods of the rollout actor."""
        self._bus, self._rollout, self._event, self._metric = bus, rollout, event, metric
        self._region, self._run, self._capacity = config.bus.region, config.run.id, config.engine.max_batch
        self._shared = config.production.enabled and rollout in config.production.rollouts
        self._reported = dict.fromkeys(EVENTS, 0.0)
        self._done = (0, time.monotonic())

    async def publish(self, engine: Engine | None) -> None:
        """Publish the metrics, an event per increased counter, and the traffic of other clients. Called every
        `EVERY_S`."""
        if not isinstance(engine, ServerEngine):
            return
        stats: dict[str, Any] = engine.stats()
        for name, kind in EVENTS.items():
            if stats[name] > self._reported[name]:
                self._reported[name] = stats[name]
                await self._event(kind, f"{name}: {stats[name]:.0f} so far", "info" if name == "starts" else "warning")
        await self._metric(**{f"server_{name}": float(value) for name, value in stats.items()})
        if self._shared:
            await self._traffic(engine)

    async def _traffic(self, engine: ServerEngine) -> None:
        """Publish the load of other clients. Nothing while the server is down, starts, or cannot tell clients apart."""
        try:
            outside = await engine.outside()
        except EngineError:
            return
        if outside is None:
            return
        now, (before, then) = time.monotonic(), self._done
        self._done = (outside.done, now)
        traffic = Traffic(
            region=self._region,
            run=self._run,
            server=self._rollout,
            active=outside.running,
            waiting=outside.queued,
            requests_per_s=max(0, outside.done - before) / max(now - then, 1e-3),
            capacity=self._capacity,
        )
        await self._bus.emit(subjects.TRAFFIC.at(region=subjects.token(self._region)), traffic)
