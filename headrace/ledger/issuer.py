"""Issues attempts: the ledger record first, then the request, so that no request is lost or counted twice.

Two actors may believe that they issue for the same run, for example a curriculum that was paused and its successor. An
issuer with a fence writes a Fence record when it starts, and every SlotIssued names that record as the last one of its
fence subject: the broker refuses the records of an older issuer with WrongSequence. An issuer without a fence (the
gateway, whose groups have one slot each) writes every SlotIssued on top of the group's last record instead, so a second
record of the same attempt is refused.
"""

import asyncio
from collections.abc import Callable, Sequence

from headrace.bus.connection import Bus
from headrace.ledger.state import RunState
from headrace.messages.ledger import Fence, SlotIssued
from headrace.messages.product import CLIENT_SUITE
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import LEDGER, TASK, token


def attempt_id(issued: SlotIssued) -> str:
    """The message id of an attempt's SlotIssued, of its request and of its Trajectory."""
    return f"{issued.run}.{issued.group}-{issued.slot}-{issued.attempt}"


class Issuer:
    """Writes attempts of one run and publishes their requests. `state` gets every record that was written."""

    def __init__(self, bus: Bus, state: RunState, request_of: Callable[[SlotIssued], RolloutRequest]) -> None:
        """request_of: builds the request of a recorded attempt; it must return the same one at every call."""
        self._bus, self._state, self._request_of = bus, state, request_of
        self._fence: tuple[str, int] | None = None

    async def fence(self, group: str, actor: str, id: str) -> Fence:
        """Write a Fence, after which the broker refuses the records of all earlier issuers. group: the name that takes
        a group's place in the fence's subject."""
        record = Fence(run=self._state.run, actor=actor, id=id)
        subject = LEDGER.at(run=self._state.run, group=group)
        self._fence = subject, await self._bus.publish(subject, record)
        return record

    async def issue(self, slots: Sequence[SlotIssued]) -> None:
        """Write the attempts' records, then publish their requests. WrongSequence when another issuer has taken
        over."""
        seqs = await asyncio.gather(*(self._write(issued) for issued in slots))
        for issued, seq in zip(slots, seqs, strict=True):
            self._state.apply(issued, seq)
        await self.request(slots)

    async def _write(self, issued: SlotIssued) -> int:
        subject = LEDGER.at(run=issued.run, group=issued.group)
        if self._fence is not None:
            fence, seq = self._fence
            return await self._bus.publish(subject, issued, msg_id=attempt_id(issued), expect=seq, expect_filter=fence)
        group = self._state.groups.get(issued.group)
        last = max((attempt.seq for _, attempt in group.attempts()), default=0) if group is not None else 0
        return await self._bus.publish(subject, issued, msg_id=attempt_id(issued), expect=last)

    async def request(self, slots: Sequence[SlotIssued]) -> None:
        """Publish the requests of recorded attempts that have no end yet. Clients ran theirs before.

        Requests that were published before may be published again: the broker drops a repeated message id, and a
        rollout actor that gets the request of a finished attempt acknowledges it.
        """
        running = [issued for issued in slots if not self._ended(issued) and issued.task.suite != CLIENT_SUITE]
        await asyncio.gather(*(self._publish(issued) for issued in running))

    async def _publish(self, issued: SlotIssued) -> None:
        subject = TASK.at(run=issued.run, lane=issued.lane, suite=token(issued.task.suite))
        await self._bus.publish(subject, self._request_of(issued), msg_id=attempt_id(issued))

    def _ended(self, issued: SlotIssued) -> bool:
        attempt = self._state.attempt(issued.group, issued.slot, issued.attempt)
        return attempt is not None and (attempt.score is not None or bool(attempt.failed))
