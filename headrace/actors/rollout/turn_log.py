"""The turn log: the checkpoint from which any other rollout actor goes on.

Every record is written on top of the last one of its trajectory (an expected sequence), so of two actors that believe
they run the same attempt only one can go on writing. Message ids stay random on purpose: the broker's deduplication
would answer a zombie's write with the successor's sequence and hide the conflict.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.received import Received
from headrace.messages.codec import decode
from headrace.messages.operations import BlobRef
from headrace.messages.rollout import SandboxKept, ToolResult, Turn, TurnDone, TurnSampled
from headrace.messages.subjects import TRAJ, TURN


class Kept(NamedTuple):
    """The sandbox as it was after a turn's calls."""

    turn: int
    node: str
    data: bytes


class Past(NamedTuple):
    """What an earlier holder of the attempt left behind."""

    turns: tuple[Turn, ...] = ()
    """In order, results filled in where they are on record; of the last one the calls may have run without."""
    node: str = ""
    sandbox: str = ""
    finished: bool = False
    """Its Trajectory is published: nothing is left to do."""
    kept: Kept | None = None
    """The newest checkpoint of its sandbox."""


class TurnLog:
    """Records of one attempt, read once and then written."""

    def __init__(self, bus: Bus, run: str, group: str, trajectory: str) -> None:
        self._bus, self._run, self._group, self._trajectory = bus, run, group, trajectory
        self._subject = TURN.at(run=run, trajectory=trajectory)
        self._last = 0
        self._writing: asyncio.Task[int] | None = None

    async def read(self) -> Past:
        """The past of this attempt; costs one small request when there is none."""
        if await self._bus.last("HR_TURN", self._subject) is None:
            return Past()
        turns: list[Turn] = []
        node = sandbox = ""
        kept: Kept | None = None
        async for received in self._bus.history("HR_TURN", self._subject):
            self._last = received.seq
            if received.error is not None and _is_kept(received):
                continue  # its blob is gone: one checkpoint less
            record = received.message
            if isinstance(record, TurnSampled):
                turns.append(record.turn)
                node, sandbox = record.node, record.sandbox
            elif isinstance(record, TurnDone):
                turns[-1] = msgspec.structs.replace(turns[-1], results=record.results)
            elif isinstance(record, SandboxKept):
                kept = Kept(record.index, record.node, record.data)
        return Past(tuple(turns), node, sandbox, await self._has_trajectory(), kept)

    async def _has_trajectory(self) -> bool:
        async for received in self._bus.history("HR_TRAJ", TRAJ.at(run=self._run, group=self._group)):
            if getattr(received.message, "id", "") == self._trajectory:
                return True
        return False

    async def sampled(self, turn: Turn, node: str, sandbox: str, fingerprint: str) -> None:
        """Write a turn; on return the broker has it and its calls may be sent. WrongSequence: another goes on here."""
        await self.settle()
        record = TurnSampled(
            run=self._run,
            trajectory=self._trajectory,
            turn=turn,
            node=node,
            sandbox=sandbox,
            fingerprint=fingerprint,
        )
        self._last = await self._bus.publish(self._subject, record, expect=self._last)

    async def done(self, index: int, results: Sequence[ToolResult]) -> None:
        """Write a turn's results, behind the sampling of the next turn: `sampled` and `settle` wait for it."""
        await self.settle()
        record = TurnDone(run=self._run, trajectory=self._trajectory, index=index, results=tuple(results))
        self._writing = asyncio.create_task(self._bus.publish(self._subject, record, expect=self._last))

    async def kept(self, index: int, node: str, data: bytes) -> None:
        """Write the sandbox behind the results of turn `index`. WrongSequence: another goes on here."""
        await self.settle()
        record = SandboxKept(run=self._run, trajectory=self._trajectory, index=index, node=node, data=data)
        self._writing = asyncio.create_task(self._bus.publish(self._subject, record, expect=self._last))
        await self.settle()

    async def settle(self) -> None:
        """Wait until everything is on record. Shielded: a write under way must not land after a successor has read."""
        if self._writing is not None:
            # Forgotten only once it is done: who is cancelled here settles again on the way out.
            self._last = await asyncio.shield(self._writing)
            self._writing = None


def _is_kept(received: Received[Any]) -> bool:
    """Whether a record whose payload can't be had is a checkpoint."""
    ref = decode(received.data, received.headers)
    return isinstance(ref, BlobRef) and ref.type.partition("/")[0] == SandboxKept.type_name
