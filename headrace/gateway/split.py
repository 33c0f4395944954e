"""Which version a new session gets: the promoted one, or in a canary stage the candidate for a share of the sessions.

A session keeps the version that it began with. The draw depends on the session's name alone, so every gateway gives
the same answer. Rollback is a change of this value.
"""

import hashlib

from headrace.messages.base import Message
from headrace.messages.product import GateState, Promotion
from headrace.messages.rollout import PolicyRef


class Split:
    """The promoted version and the candidate's share, as the feedback actor keeps them in HR_STATE."""

    def __init__(self) -> None:
        self.promoted = PolicyRef()
        """`latest` until a version is promoted."""
        self.gate = GateState(run="")

    def apply(self, message: Message | None) -> None:
        """Adopt a value of HR_STATE; other values are ignored."""
        match message:
            case Promotion():
                self.promoted = message.policy
            case GateState():
                self.gate = message

    def policy(self, session: str) -> PolicyRef:
        """The version of a new session."""
        canary = self.gate.stage == "canary" and self.gate.promoted == self.promoted
        return self.gate.candidate if canary and place(session) < self.gate.share else self.promoted

    @property
    def shadow(self) -> PolicyRef | None:
        """The candidate that answers beside the promoted version, unseen; None while there is none."""
        return self.gate.candidate if self.gate.stage == "shadow" else None


def place(session: str) -> float:
    """A number between 0 and 1 that belongs to the session."""
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "big") / 2**64
