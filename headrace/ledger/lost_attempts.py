"""Finds the attempt that a dead letter ends, so that its issuer does not wait for it without end.

A RolloutRequest that no rollout actor could handle, and a Trajectory that the judge could not handle, leave their slot
without an outcome. The dead letter contains the message, which names the attempt. If the payload cannot be read, the
name of the message does: both are named ``<run>.<trajectory>``. A request that was handed back has the suffix
``.h<count>``, a retried dead letter ``.r<number>``.
"""

import re
from typing import NamedTuple

from headrace.bus.runtime.dead_letters import forged, name_of
from headrace.messages.codec import UnreadableMessage, decode
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import RolloutRequest, Trajectory

REASON = "dead_letter"
"""The reason with which such an attempt counts as failed."""
_TRAJECTORY = re.compile(r"(.*)-([0-9]{1,9})-([0-9]{1,9})", re.DOTALL)
"""Group, slot and attempt. Other digits of Unicode are no numbers for `int`, or stand for the same ones."""


class LostAttempt(NamedTuple):
    """The attempt that a dead letter ends."""

    run: str
    group: str
    slot: int
    attempt: int


def lost_attempt(letter: DeadLetter) -> LostAttempt | None:
    """The attempt that a dead letter ends; None for the dead letter of any other message."""
    if forged(letter):
        return None
    if letter.stream != "HR_TASK" and not (letter.stream == "HR_TRAJ" and letter.consumer.startswith("judge")):
        return None
    try:
        message = decode(letter.payload, letter.headers)
    except UnreadableMessage:
        message = None
    if isinstance(message, RolloutRequest | Trajectory):
        return LostAttempt(message.run, message.group, message.slot, message.attempt)
    run, _, trajectory = name_of(letter).partition(".")
    match = _TRAJECTORY.fullmatch(re.sub(r"(\.[hr]\d+)+$", "", trajectory))
    return LostAttempt(run, match[1], int(match[2]), int(match[3])) if match else None
