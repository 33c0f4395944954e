"""The turn log: the records from which any rollout actor resumes an attempt.

Every record is written on top of the last one of its trajectory (an expected sequence), so of two actors that run the
same attempt only one can continue to write. Message ids are random, because with fixed ids the broker's deduplication
would answer a stale actor's write with the sequence of its successor's record and hide the conflict.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.actors.rollout.publication import message_id
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.signatures import ID_HEADER
from headrace.messages.rollout import ToolResult, Turn, TurnDone, TurnSampled
from headrace.messages.sandbox import Snapshot
from headrace.messages.subjects import TRAJ, TURN
from headrace.policy import routes

AT_ONCE = 64 << 10
"""Bytes of routes that are packed in less time than a thread needs to be handed them."""


async def _on_wire(turn: Turn) -> Turn:
    """A turn as it is stored. Many routes are packed in a thread."""
    if turn.routed is None or len(turn.routed.data) <= AT_ONCE:
        return routes.on_wire(turn)
    return await asyncio.to_thread(routes.on_wire, turn)


class ResumeState(NamedTuple):
    """The state of an attempt in its turn log, from which another rollout actor resumes."""

    turns: tuple[Turn, ...] = ()
    """The turns in order, with the recorded results. The last turn may have none although its calls ran."""
    node: str = ""
    sandbox: str = ""
    finished: bool = False
    """Whether the Trajectory is published, so that nothing is left to do."""
    steps: tuple[Snapshot, ...] = ()
    """The changes at the end of every step that ended."""


class TurnLog:
    """The records of one attempt: read once, then written."""

    def __init__(self, bus: Bus, run: str, group: str, trajectory: str) -> None:
        self._bus, self._run, self._group, self._trajectory = bus, run, group, trajectory
        self._subject = TURN.at(run=run, trajectory=trajectory)
        self._last = 0
        self.first = 0
        """Sequence of the first record; 0 before there is one."""
        self._writing: asyncio.Task[int] | None = None

    async def read(self) -> ResumeState:
        """Read the state from which to resume. For a new attempt this is one small request."""
        self._last = await self._bus.tail("HR_TURN", self._subject)
        if not self._last:
            return ResumeState()
        turns: list[Turn] = []
        node = sandbox = ""
        steps: list[Snapshot] = []
        async for received in self._bus.history("HR_TURN", self._subject):
            self._last = max(self._last, received.seq)
            self.first = self.first or received.seq
            record = received.message
            if isinstance(record, TurnSampled):
                turns.append(routes.in_memory(record.turn))
                node, sandbox = record.node, record.sandbox
            elif isinstance(record, TurnDone):
                turns[record.index] = msgspec.structs.replace(turns[record.index], results=record.results)
                steps += [record.step] if record.step is not UNSET else []
        finished = await self._has_trajectory()
        return ResumeState(tuple(turns), node, sandbox, finished, tuple(steps))

    async def is_current(self) -> bool:
        """Whether the last record is this log's: False when another actor has written since, or a write failed."""
        try:
            await self.flush()
        except BusError:
            return False
        return await self._bus.tail("HR_TURN", self._subject) == self._last

    async def _has_trajectory(self) -> bool:
        """By its name, undecoded: when a group of n slots is handed back, its n resumptions would decode n
        trajectories each, and fetch those that are claim checks."""
        wanted = message_id(self._run, self._trajectory)
        async for received in self._bus.records("HR_TRAJ", TRAJ.at(run=self._run, group=self._group)):
            if received.headers.get(ID_HEADER) == wanted and self._bus.signed(received):
                return True
        return False

    async def sampled(self, turn: Turn, node: str, sandbox: str, fingerprint: str) -> None:
        """Write a turn. When this returns, the broker has stored it and its calls may run.

        WrongSequence: another rollout actor has taken over the attempt.
        """
        await self.flush()
        record = TurnSampled(
            run=self._run,
            trajectory=self._trajectory,
            turn=await _on_wire(turn),
            node=node,
            sandbox=sandbox,
            fingerprint=fingerprint,
        )
        self._last = await self._bus.publish(self._subject, record, expect=self._last)
        self.first = self.first or self._last

    async def done(self, index: int, results: Sequence[ToolResult], step: Snapshot | UnsetType = UNSET) -> None:
        """Write a turn's results while the next turn is sampled; `sampled` and `flush` wait for the write. step: as in
        `TurnDone`."""
        await self.flush()
        record = TurnDone(run=self._run, trajectory=self._trajectory, index=index, results=tuple(results), step=step)
        self._writing = asyncio.create_task(self._bus.publish(self._subject, record, expect=self._last))

    async def flush(self) -> None:
        """Wait until every record is stored. Shielded, so that no pending write is stored after a successor has
        read."""
        if self._writing is not None:
            # Cleared only after the write: a cancelled caller flushes once more before it ends.
            self._last = await asyncio.shield(self._writing)
            self._writing = None
