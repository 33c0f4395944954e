"""The order of a step among the steps beside it.

A step begins right after the update of the step before it, whose version is copied and hashed meanwhile. Its own
update waits until two records are on the bus: the outcome of the step before, which names that hash, and its own
manifest. So the records have the order of a trainer that does one thing after the other, and a kill at any moment loses
only what a published manifest repeats.
"""

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from headrace.messages.training import StepManifest
from headrace.training.figures.clock import Clock

T = TypeVar("T")


class Promise(Future[T]):
    """A value that a task sets and that tasks and the worker thread wait for. No waiting task can cancel it."""

    def __init__(self, value: T | None = None) -> None:
        """value: where it is known already."""
        super().__init__()
        self.set_running_or_notify_cancel()
        if value is not None:
            self.set_result(value)

    async def wait(self) -> T:
        """The value, in a task."""
        return await asyncio.wrap_future(self)

    def fail(self, error: BaseException) -> None:
        """Raise in all that wait, unless the value is set."""
        if not self.done():  # a cancellation ends its own task, not the waiting thread
            self.set_exception(error if isinstance(error, Exception) else RuntimeError("the trainer has stopped"))


class Turn:
    """One step, from its batch until its version is announced."""

    def __init__(self, step: int, before: "Turn | None", state_hash: str = "") -> None:
        """before: the turn of the step before it; without one, `state_hash` is that of the version it updates."""
        self.step = step
        self.base: Promise[str] = before.recorded if before is not None else Promise(state_hash)
        """State hash of the version that the step updates, when the outcome that made it is on the bus."""
        self.announced_before: Promise[bool] = before.ended if before is not None else Promise(True)
        """Set when the version before is announced: at most one version waits for the disk."""
        self.announced: Promise[tuple[int, StepManifest]] = Promise()
        """The manifest and its sequence, when it is on the bus."""
        self.updated = asyncio.Event()
        """Set when the update is made, or refused: the next step may begin."""
        self.recorded: Promise[str] = Promise()
        """State hash of the version that the step makes, when its outcome is on the bus."""
        self.ended: Promise[bool] = Promise()

    def wait(self, clock: Clock) -> None:
        """In the worker thread: wait for the records that precede the update. Raises the error of a failed record."""
        with clock.spent("publish"):
            self.base.result()
        with clock.spent("records"):
            self.announced.result()

    def fail(self, error: BaseException) -> None:
        """End everything that waits for this turn."""
        for promise in (self.announced, self.recorded, self.ended):
            promise.fail(error)
