"""The dead-letter actor: stores every message that a consumer rejected or failed too often, with reason and payload.

The broker's advisories and the copies of rejected work are in streams, so this actor misses nothing while it is down.
The dead-letter queue belongs to the broker, not to a run: several dead-letter actors share one consumer.

A request that no rollout actor pulls gets no advisory. When the run has had no live rollout actor for `[rollout]
wait_s`, its waiting requests become dead letters too, so that no issuer waits for them without end.
"""

import time
from typing import ClassVar

import msgspec

from headrace.bus.nats.received import Received
from headrace.bus.runtime import ack_waits, dead_letters
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.presence import LOOK_S, Absences
from headrace.messages import operations
from headrace.messages.operations import Advisory, Rejected
from headrace.messages.subjects import ADVISORY, EVENT
from headrace.replay import reproduce


class DeadLetter(Actor):
    """Advisory and Rejected in, DeadLetter out."""

    role: ClassVar[str] = "dead_letter"

    async def start(self) -> None:
        """Consume advisories and rejections; each is redelivered until its dead letter is stored."""
        self.written = 0
        await self.consume(
            ADVISORY,
            self._on_notice,
            durable="dead_letter",
            filter=ADVISORY_FILTERS,
            credit=4,
            ack_wait=ack_waits.DEAD_LETTER_S,
            max_deliver=-1,
        )
        await self.consume(
            EVENT,
            self._on_notice,
            durable="dead_letter-rejected",
            filter=EVENT.where(run="*", actor="*", type=Rejected.type_name),
            credit=4,
            ack_wait=ack_waits.DEAD_LETTER_S,
            max_deliver=-1,
        )
        self._absences = Absences(self.bus, self.run)
        await self._absences.seconds("rollout")
        wait_s = self.config.rollout.wait_s
        self.every(min(LOOK_S, wait_s / 4), self._end_unpulled, "requests that no rollout actor pulls")

    async def _end_unpulled(self) -> None:
        """Make dead letters of the run's requests once it has had no live rollout actor for `wait_s`."""
        wait_s = self.config.rollout.wait_s
        if await self._absences.seconds("rollout") < wait_s:
            return
        async for stored in dead_letters.queued(self.bus, self.run):
            if time.time() - stored.time >= wait_s:
                await self._store(dead_letters.unpulled(self.run, stored, wait_s))

    async def _on_notice(self, received: Received[Advisory | Rejected]) -> None:
        letter = await dead_letters.dead_letter_from(self.bus, received)
        if letter is not None:
            await self._store(letter)

    async def _store(self, letter: operations.DeadLetter) -> None:
        letter = msgspec.structs.replace(letter, command=reproduce.letter(self.config, self.run, letter))
        seq = await dead_letters.publish(self.bus, letter)
        self.written += 1
        self.status = f"{self.written} dead letters"
        await self.event(
            "dead_letter",
            f"{letter.subject or letter.stream} #{letter.stream_seq} for {letter.consumer}: {letter.reason}",
            "error",
            stream=letter.stream,
            seq=letter.stream_seq,
            consumer=letter.consumer,
            type=letter.type,
            letter=seq,
            command=letter.command,
        )


ADVISORY_FILTERS = tuple(ADVISORY.where(kind=kind) for kind in ("MAX_DELIVERIES", "MSG_TERMINATED"))
