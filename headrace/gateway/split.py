"""Assigns a policy version to each new session: the promoted version, or the candidate for the canary's share.

A session keeps the version that it began with. The assignment depends on the session's name alone, so every gateway
assigns the same version. A rollback changes the promoted version, and with it the version of later sessions.
"""

import hashlib

from headrace.messages.base import Message
from headrace.messages.product import GateState, Promotion
from headrace.messages.rollout import PolicyRef


class Split:
    """The promoted version and the candidate's share, which the feedback actor stores in HR_PRODUCT."""

    def __init__(self) -> None:
        self.promoted = PolicyRef()
        """`latest` until a version is promoted."""
        self.gate = GateState(run="")

    def apply(self, message: Message | None) -> None:
        """Adopt a value of HR_PRODUCT; other values are ignored."""
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
        """The candidate that answers shadow turns; None outside the shadow stage."""
        return self.gate.candidate if self.gate.stage == "shadow" else None


def place(session: str) -> float:
    """A number in [0, 1) that is computed from the session's name."""
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "big") / 2**64
