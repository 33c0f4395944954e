"""How long a run has had no live actor of a role: the deadline of a wait that only such an actor can end."""

import time
from collections import defaultdict

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages.operations import Heartbeat

LOOK_S = 30.0
"""Seconds from one look at the live actors to the next."""


class Absences:
    """Watches the heartbeats of a run's actors, by role."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._run = bus, run
        self._alive_at: defaultdict[str, float] = defaultdict(time.monotonic)
        """Role to the moment of its last heartbeat seen here; the first look counts as one."""

    async def seconds(self, role: str) -> float:
        """Seconds since the run last had a live actor of `role`; 0.0 while it has one, or while the broker is away."""
        alive_at = self._alive_at[role]
        try:
            beats = [message for message, _ in (await (await self._bus.kv("HR_PRESENCE")).items(f"{role}.>")).values()]
        except BusError:
            return 0.0  # the next call looks again
        if any(isinstance(beat, Heartbeat) and beat.run in ("", self._run) for beat in beats):
            self._alive_at[role] = time.monotonic()
            return 0.0
        return time.monotonic() - alive_at
