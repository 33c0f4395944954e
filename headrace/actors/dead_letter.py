"""dead_letter: parks what nobody could handle, with its reason, its trace and its payload.

The broker's advisories and the copies of rejected work lie in streams, so nothing is missed while this actor is away.
Letters are not a run's: one broker has one such desk, and several actors at it share the work.
"""

from typing import ClassVar

import msgspec

from headrace.bus import dead_letters
from headrace.bus.actor import Actor
from headrace.bus.received import Received
from headrace.messages.operations import Advisory, Rejected
from headrace.messages.subjects import ADVISORY, EVENT
from headrace.replay import reproduce


class DeadLetter(Actor):
    """Advisory and Rejected in, DeadLetter out."""

    role: ClassVar[str] = "dead_letter"

    async def start(self) -> None:
        """Take both kinds of notice; a letter is tried until it is written."""
        self.written = 0
        await self.consume(
            ADVISORY,
            self._on_notice,
            durable="dead_letter",
            filter=ADVISORY_FILTERS,
            credit=4,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
        )
        await self.consume(
            EVENT,
            self._on_notice,
            durable="dead_letter-rejected",
            filter=EVENT.where(run="*", actor="*", type=Rejected.type_name),
            credit=4,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
        )

    async def _on_notice(self, received: Received[Advisory | Rejected]) -> None:
        letter = await dead_letters.letter_of(self.bus, received)
        if letter is None:
            return
        letter = msgspec.structs.replace(letter, command=reproduce.letter(self.config, self.run, letter))
        seq = await dead_letters.publish(self.bus, letter)
        self.written += 1
        self.status = f"{self.written} letters"
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


ACK_WAIT_S = 2.0
"""What a desk held when it was killed is another's so soon; a letter that was written twice is stored once."""
ADVISORY_FILTERS = tuple(ADVISORY.where(kind=kind) for kind in ("MAX_DELIVERIES", "MSG_TERMINATED"))
