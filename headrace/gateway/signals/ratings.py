"""Publishes users' ratings.

A client that got no answer sends its rating again; the same rating twice in a row is stored once. A rating that differs
from the one before it is stored always: accept, undo, accept are three records, also within the broker's duplicate
window.
"""

import secrets
from collections import OrderedDict

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages import subjects
from headrace.messages.operations import Ack
from headrace.messages.product import AskFate, Feedback, FeedbackSettled

FATE_S = 3.0
"""The longest wait for what becomes of a rating."""
REMEMBERED = 10_000
"""Sessions whose newest rating is kept in memory. A repeat of an older one is stored again and supersedes it."""


class Ratings:
    """The ratings that one gateway publishes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.denied: set[str] = set()
        """Users whose data was purged: their later ratings are stored as not allowed for training."""
        self._instance = secrets.token_hex(6)
        """Part of the message ids: other gateways, and this one after a restart, count from 0 and need other ids."""
        self._newest: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Trajectory to its newest rating and the number of changes before it."""

    def outcome(self, feedback: Feedback) -> dict[str, str]:
        """The outcome of a rating and its reason where the gateway is certain of what the feedback actor will record;
        empty where that actor decides."""
        if feedback.user in self.denied:
            return {"outcome": "opted_out", "reason": "its user is on the deny-list"}
        if not feedback.training_allowed:
            return {"outcome": "opted_out", "reason": f"tenant {feedback.tenant} did not opt in with this key"}
        if feedback.untrainable:
            return {"outcome": "discarded", "reason": feedback.untrainable}
        return {}

    async def fate(self, trajectory: str, since: int = 0) -> dict[str, str]:
        """The outcome of the newest rating of a session and the reason; `waiting` before its end, and
        where no feedback actor answers. since: the sequence of a rating that the answer must have seen."""
        where = subjects.RPC.at(service="feedback", caller="gateway", method="fate")
        try:
            told = await self._bus.request(where, AskFate(trajectory=trajectory, since=since), timeout=FATE_S)
        except BusError:
            return {"outcome": "waiting", "reason": "no feedback actor answers now"}
        if isinstance(told, FeedbackSettled):
            return {"outcome": told.fate, "reason": told.detail}
        return {"outcome": "waiting", "reason": told.detail if isinstance(told, Ack) else ""}

    async def publish(self, feedback: Feedback) -> dict[str, str]:
        """Store a rating. Returns its outcome and the reason, as far as they are known at once. BusError."""
        if feedback.user in self.denied:
            feedback = msgspec.structs.replace(feedback, training_allowed=False)
        given = f"{feedback.signal}{feedback.at}.{feedback.thumb}"
        before, number = self._newest.get(feedback.trajectory, (given, 0))
        if before != given:
            number += 1
        self._newest[feedback.trajectory] = (given, number)
        self._newest.move_to_end(feedback.trajectory)
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        subject = subjects.FEEDBACK.at(tenant=subjects.token(feedback.tenant), user=feedback.user)
        msg_id = f"{self._instance}.{feedback.trajectory}.{number}.{given}"
        seq = await self._bus.publish(subject, feedback, msg_id=msg_id)
        told = await self.fate(feedback.trajectory, seq)
        return told if told["outcome"] != "waiting" else self.outcome(feedback) or told
