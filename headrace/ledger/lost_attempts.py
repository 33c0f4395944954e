"""What a dead letter means for the books: an attempt that will never end by itself.

A RolloutRequest that nobody could fill and a Trajectory that the judge could not handle leave their slot without an
outcome. The letter carries the message, so the slot is known from it, or from its message id where the payload cannot
be read: ``<run>.<trajectory>``, which rollouts give to both. Handing a request back adds ``.h<count>``, sending a
letter again ``.r<letter>``.
"""

import re
from typing import NamedTuple

from headrace.messages.codec import UnknownType, decode
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import RolloutRequest, Trajectory

REASON = "dead_letter"


class Lost(NamedTuple):
    """An attempt of some run."""

    run: str
    group: str
    slot: int
    attempt: int


def lost(letter: DeadLetter) -> Lost | None:
    """The attempt that a dead letter ends; None when it ends none."""
    if letter.stream != "HR_TASK" and not (letter.stream == "HR_TRAJ" and letter.consumer.startswith("judge")):
        return None
    try:
        message = decode(letter.payload, letter.headers)
    except UnknownType:
        message = None
    if isinstance(message, RolloutRequest | Trajectory):
        return Lost(message.run, message.group, message.slot, message.attempt)
    run, _, trajectory = letter.headers.get("Nats-Msg-Id", "").partition(".")
    group, *numbers = re.sub(r"(\.[hr]\d+)+$", "", trajectory).rsplit("-", 2)
    if len(numbers) == 2 and all(number.isdigit() for number in numbers):
        return Lost(run, group, int(numbers[0]), int(numbers[1]))
    return None
