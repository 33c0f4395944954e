"""Makes batches from the closings of a run, in their order; records are fetched while the previous step runs.

Reading records takes the interpreter from the thread that trains, and each of its calls of torch gives it away. So
nothing is fetched between a step's batch and its first forward pass (`hold`, `resume`).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.actors.trainer import records
from headrace.actors.trainer.records import StalenessWindow
from headrace.algorithms.staleness import Bounds
from headrace.bus.connection import Bus
from headrace.bus.runtime.tracing import Link
from headrace.messages.ledger import GroupClosed, StalenessBound
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import CLOSE
from headrace.messages.training import BatchGroup
from headrace.replay.fetching import Records, fetch


class Ready(NamedTuple):
    """A closed group with its records."""

    group: BatchGroup
    records: Records
    links: tuple[Link, ...]
    """Links to the spans that published its trajectories."""
    bytes: int
    """Of its records at the broker."""


class Batch(NamedTuple):
    """The groups of one step, with their records together."""

    groups: tuple[BatchGroup, ...]
    records: Records
    links: list[Link]
    bytes: int = 0

    @classmethod
    def of(cls, ready: list[Ready]) -> "Batch":
        """The batch of these groups."""
        trajectories = {seq: record for ready_group in ready for seq, record in ready_group.records[0].items()}
        scores = {seq: record for ready_group in ready for seq, record in ready_group.records[1].items()}
        links = [link for ready_group in ready for link in ready_group.links]
        return cls(
            tuple(ready_group.group for ready_group in ready),
            (trajectories, scores),
            links,
            sum(each.bytes for each in ready),
        )


class Closings:
    """The closed groups of a run that are not yet in a batch."""

    def __init__(self, bus: Bus, run: str, groups_per_step: int) -> None:
        self._bus, self._run = bus, run
        self.groups_per_step = groups_per_step
        self.ready: asyncio.Queue[Ready] = asyncio.Queue(2 * groups_per_step)
        self._bounds: Bounds | None = None
        """The staleness bound of every batch, read from the closings."""
        self._may_fetch = asyncio.Event()
        self._may_fetch.set()
        self._loop = asyncio.get_running_loop()

    def hold(self) -> None:
        """Fetch nothing until `resume`, when a whole batch is ready."""
        if self.ready.qsize() >= self.groups_per_step:
            self._may_fetch.clear()

    def resume(self) -> None:
        """Fetch again. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._may_fetch.set)

    async def follow(self, batches: int, expect: Callable[[Mapping[int, Trajectory]], None]) -> None:
        """Fetch the records of closed groups ahead of the step. batches: number of finished batches. expect: called
        with the trajectories of each group, as soon as they are here."""
        position, taken = 0, batches * self.groups_per_step
        async for received in self._bus.follow("HR_SCORE", CLOSE.where(run=self._run)):
            closed = received.message
            if isinstance(closed, StalenessBound):  # it precedes the closings of the first batch that it applies to
                bounds = self._bounds
                self._bounds = (
                    bounds.changed(closed.first_batch, closed.bound) if bounds else Bounds.constant(closed.bound)
                )
            if not isinstance(closed, GroupClosed):
                continue
            if position >= taken:
                group = records.batch_group(received.seq, closed)
                links, sizes = list[Link](), list[int]()
                await self._may_fetch.wait()
                fetched = await fetch(self._bus, [group], links, sizes)
                expect(fetched[0])
                await self.ready.put(Ready(group, fetched, tuple(links), sum(sizes)))
            position += 1

    def window(self, step: int) -> StalenessWindow | None:
        """The staleness bounds of a step; None before one was published."""
        return StalenessWindow.of(self._bounds, step) if self._bounds is not None else None
