"""Reports of a gateway's load, by which the scavenger lends and reclaims capacity.

A report is sent every second. It is sent at once, at most `MOST_PER_S` times a second, when a session begins or when
more clients' turns run than the last report gave: capacity is reclaimed on the first request, not a second later. A
turn may be shorter than the time between two reports, so a report gives the highest number of concurrent turns since
the last one.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.gateway.sessions import Run
from headrace.messages import subjects
from headrace.messages.product import Traffic

EVERY_S = 1.0
MOST_PER_S = 20
RATE_S = 10.0
"""Seconds over which the rate of requests is counted."""


class TrafficReports:
    """The load of one gateway. `follow` reports it."""

    def __init__(self, bus: Bus, config: Config, run: str, gateway: str, sessions: Mapping[str, Run]) -> None:
        self._bus, self._config, self._sessions = bus, config, sessions
        self._run, self._gateway = run, gateway
        self._moments: list[float] = []
        self._turns = self._most_turns = self._reported = 0
        self._more = asyncio.Event()

    def begun(self) -> None:
        """Count a session that begins."""
        self._moments.append(time.monotonic())
        self._more.set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context around a turn of a client."""
        self._moments.append(time.monotonic())
        self._turns += 1
        self._most_turns = max(self._most_turns, self._turns)
        if self._turns > self._reported:
            self._more.set()
        try:
            yield
        finally:
            self._turns -= 1

    async def follow(self) -> None:
        """Report until cancelled."""
        while True:
            await self._bus.emit(subjects.TRAFFIC.at(region=subjects.token(self._config.bus.region)), self._report())
            self._more.clear()
            await asyncio.sleep(1.0 / MOST_PER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._more.wait()

    def _report(self) -> Traffic:
        now = time.monotonic()
        self._moments = [moment for moment in self._moments if now - moment < RATE_S]
        states = [session.state for session in self._sessions.values() if not session.over | session.elsewhere]
        active = states.count("running") + self._most_turns
        self._most_turns = self._reported = self._turns
        return Traffic(
            region=self._config.bus.region,
            run=self._run,
            active=active,
            waiting=states.count("queued"),
            requests_per_s=len(self._moments) / RATE_S,
            capacity=len(self._config.production.rollouts),
            gateway=self._gateway,
        )
