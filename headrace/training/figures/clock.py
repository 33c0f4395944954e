"""Where a trainer's time goes: each moment belongs to one cause, so the causes of a step add up to its wall time.

The idea: the clock is always in one phase. Entering an inner phase stops the outer one, and leaving it lets the outer
one go on. A step's time runs from the end of the step before it to its own, so it includes the checkpoint between them
and the wait for the version before. Copies and fsync behind the step's own work are in no cause.

On CUDA a collective ends on the device after the host has gone on, so `communication` there holds only what the host
waited for, and the rest is in `busy`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Cause = Literal["busy", "batch", "rescore", "straggler", "communication", "publish", "checkpoint", "records"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""records: what none of the others explains, above all reading and writing records on the broker."""


class Clock:
    """The time of one trainer. Threads may call it one after another, never at once."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._cause: Cause = "records"
        self._since = self._began = now()
        self.seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        """Since the last `lap`, without the phase that has not ended."""

    def _enter(self, cause: Cause) -> None:
        now = self._now()
        self.seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    @contextmanager
    def spent(self, cause: Cause) -> Iterator[None]:
        """Time in this block belongs to `cause`."""
        outer = self._cause
        self._enter(cause)
        try:
            yield
        finally:
            self._enter(outer)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Time of a collective: communication while a step is computed, else the outer phase's."""
        with self.spent("communication" if self._cause in ("busy", "rescore") else self._cause):
            yield

    def waited(self, seconds: float) -> None:
        """Of the time of communication, this much was a wait for slower processes."""
        self.seconds["communication"] -= seconds
        self.seconds["straggler"] += seconds

    def lap(self) -> tuple[float, dict[Cause, float]]:
        """Wall time since the last lap, and its seconds by cause. A new lap begins."""
        self._enter(self._cause)
        wall, told = self._since - self._began, self.seconds
        self._began, self.seconds = self._since, dict.fromkeys(CAUSES, 0.0)
        return wall, told


class Pause:
    """The time from one step's update to the first forward pass of the next step, without the wait for its batch."""

    def __init__(self, updated_at: float | None, clock: Clock) -> None:
        """updated_at: time.perf_counter() at the end of the update; None where the step made none. clock: its lap began
        after the update."""
        self._updated_at, self._clock = updated_at, clock
        self.seconds = 0.0
        """0 before `end`, and without an update."""

    def end(self) -> None:
        """A forward pass begins. Nothing at a second one."""
        if self._updated_at is not None:
            self.seconds = time.perf_counter() - self._updated_at - self._clock.seconds["batch"]
            self._updated_at = None
