"""Records whether environment nodes answer one caller's acquires, and builds its NoCapacity."""

import time

from headrace.messages.sandbox import Acquire, NoCapacity


class Silence:
    """The answers to the acquires of one caller."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._since = 0.0
        self._answered = False

    def unanswered(self, asked: float) -> None:
        """No node answered. asked: `time.monotonic` of the acquire."""
        self._since = self._since or asked

    def answer(self) -> None:
        """A node answered; a refusal is an answer too."""
        self._since, self._answered = 0.0, True

    def cut_off(self) -> None:
        """This actor was disconnected and could not ask, so nothing is known about the nodes."""
        self._since = 0.0

    def no_capacity(self, request: Acquire) -> NoCapacity:
        """The exception for a caller that stops waiting."""
        now = time.monotonic()
        waited_s, unanswered_s = now - self._started, now - self._since if self._since else 0.0
        if unanswered_s:
            error = NoCapacity(
                f"no environment node of run {request.run} answered for {unanswered_s:.0f} s: start one with `headrace "
                f"actor environment --run {request.run}`"
            )
        else:
            error = NoCapacity(f"no node had capacity for {request.group} within {waited_s:.0f} s")
        error.waited_s, error.unanswered_s, error.answered = waited_s, unanswered_s, self._answered
        return error
