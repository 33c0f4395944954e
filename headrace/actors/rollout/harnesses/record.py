"""The turns of an attempt whose agent holds several conversations: one turn log, a segment for each conversation.

A conversation is a session of the gateway's state machine. Its turns are stored as the attempt's own, numbered in the
order in which they were sampled, so replay, audit, judge and trainer read them as any attempt's turns.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.messages.rollout import ToolResult, Turn


class AttemptRecord:
    """The turns of one attempt."""

    def __init__(self, log: TurnLog, node: str, sandbox: str) -> None:
        """log: read already."""
        self._log, self._node, self._sandbox = log, node, sandbox
        self._writing = asyncio.Lock()
        self._segments: dict[str, ConversationRecord] = {}
        self.turns: list[Turn] = []

    @property
    def segments(self) -> int:
        """Number of conversations."""
        return len(self._segments)

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(len(turn.ids) for turn in self.turns)

    def of(self, conversation: str) -> "ConversationRecord":
        """The record of a conversation."""
        if conversation not in self._segments:
            self._segments[conversation] = ConversationRecord(self, len(self._segments))
        return self._segments[conversation]

    def longest(self) -> int:
        """The segment with the most turns, the first of several."""
        counts = [0] * len(self._segments)
        for turn in self.turns:
            counts[turn.segment] += 1
        return counts.index(max(counts)) if counts else 0

    async def sampled(self, turn: Turn, fingerprint: str) -> int:
        """Store a turn; its index in the attempt. WrongSequence."""
        async with self._writing:
            turn = msgspec.structs.replace(turn, index=len(self.turns))
            await self._log.sampled(turn, self._node, self._sandbox, fingerprint)
            self.turns.append(turn)
            return turn.index

    async def done(self, index: int, results: Sequence[ToolResult]) -> None:
        """Store the results of a turn."""
        async with self._writing:
            self.turns[index] = msgspec.structs.replace(self.turns[index], results=tuple(results))
            await self._log.done(index, results)

    async def flush(self) -> None:
        """Wait until all is stored."""
        async with self._writing:
            await self._log.flush()


class ConversationRecord:
    """The turns of one conversation, as `ClientTurns` stores them: each has its index in the conversation there."""

    def __init__(self, attempt: AttemptRecord, segment: int) -> None:
        self._attempt, self._segment = attempt, segment
        self._places: list[int] = []

    async def read(self) -> ResumeState:
        """Nothing: a record is read when its conversation begins."""
        return ResumeState()

    async def is_current(self) -> bool:
        """One rollout actor alone has the endpoint."""
        return True

    async def sampled(self, turn: Turn, node: str, sandbox: str, fingerprint: str) -> None:
        """`TurnLog.sampled`."""
        turn = msgspec.structs.replace(turn, segment=self._segment)
        self._places.append(await self._attempt.sampled(turn, fingerprint))

    async def done(self, index: int, results: Sequence[ToolResult]) -> None:
        """`TurnLog.done`."""
        await self._attempt.done(self._places[index], results)

    async def flush(self) -> None:
        """`TurnLog.flush`."""
        await self._attempt.flush()
