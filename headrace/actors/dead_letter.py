"""The dead-letter actor: stores every message that a consumer gave up, with reason, trace and payload.

The broker's advisories and the copies of rejected work are in streams, so this actor misses nothing while it is down.
The dead-letter queue belongs to the broker, not to a run: several dead-letter actors share one consumer.
"""

from typing import ClassVar

import msgspec

from headrace.bus.nats.received import Received
from headrace.bus.runtime import ack_waits, dead_letters
from headrace.bus.runtime.actor import Actor
from headrace.messages.operations import Advisory, Rejected
from headrace.messages.subjects import ADVISORY, EVENT
from headrace.replay import reproduce


class DeadLetter(Actor):
    """Advisory and Rejected in, DeadLetter out."""

    role: ClassVar[str] = "dead_letter"

    async def start(self) -> None:
        """Consume both kinds of notice; each is redelivered until its dead letter is stored."""
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

    async def _on_notice(self, received: Received[Advisory | Rejected]) -> None:
        letter = await dead_letters.dead_letter_from(self.bus, received)
        if letter is None:
            return
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
