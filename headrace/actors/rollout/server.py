"""Reports on a rollout actor's SGLang server: its metrics, its restarts, and the requests of other clients.

Metrics are published as a Metric, and a lost or restarted server as an event. The requests of other clients are
published as Traffic, the scavenger's second source: a gateway counts only the sessions that it opened, and requests
that a product sends directly to the server appear only in the server's metrics, which this actor reads.

An actor of the product publishes this Traffic with any engine, because the report names its region: the scavenger lends
an actor by the load of the gateways of its region.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.bus.connection import Bus
from headrace.bus.runtime.actor import Level
from headrace.config import Config
from headrace.engines.base import Engine, EngineError, ServerEngine
from headrace.messages import subjects
from headrace.messages.product import Traffic

EVERY_S = 1.0
EVENTS: dict[str, tuple[str, Level, str]] = {
    "hung": ("server_hung", "warning", "a server ran and did not answer; one that headrace started is killed"),
    "losses": ("server_lost", "warning", "a server ended or hangs; one that headrace started is started again (logs/)"),
    "returns": ("server_returned", "info", "a lost server serves its version again"),
    "starts": ("server_started", "info", "a server process was started"),
    "reloads": ("version_reloaded", "warning", "an update failed, and the version before it was loaded again"),
    "unchecked": ("server_unchecked", "warning", "a server's weights are not compared by checksums (the log says why)"),
    "tensor_failures": ("weights_from_disk", "warning", "a version could not be sent as tensors (see the log)"),
}
"""Counters of the engine, and the event that an increase causes: its kind, level and text."""


class ServerReports:
    """Reports on the SGLang server of one rollout actor, and on the region of an actor of the product."""

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
        """Publish the traffic of other clients, and of a server its metrics and an event per increased counter. Called
        every `EVERY_S`."""
        server = engine if isinstance(engine, ServerEngine) else None
        if server is not None:
            stats: dict[str, Any] = server.stats()
            for name, (kind, level, text) in EVENTS.items():
                if stats.get(name, 0.0) > self._reported[name]:
                    self._reported[name] = stats[name]
                    await self._event(kind, f"{text}; {stats[name]:.0f} so far", level)
            await self._metric(**{f"server_{name}": float(value) for name, value in stats.items()})
        if self._shared:
            await self._traffic(server)

    async def _traffic(self, engine: ServerEngine | None) -> None:
        """Publish the load of other clients: none where the engine has no server, or its server cannot tell clients
        apart. Nothing while a server is down or starts, because such an actor serves no region."""
        try:
            outside = await engine.outside() if engine is not None else None
        except EngineError:
            return
        running, queued, done = (outside.running, outside.queued, outside.done) if outside is not None else (0, 0, 0)
        now, (before, then) = time.monotonic(), self._done
        self._done = (done, now)
        traffic = Traffic(
            region=self._region,
            run=self._run,
            server=self._rollout,
            active=running,
            waiting=queued,
            requests_per_s=max(0, done - before) / max(now - then, 1e-3),
            capacity=self._capacity,
        )
        await self._bus.emit(subjects.TRAFFIC.at(region=subjects.token(self._region)), traffic)
