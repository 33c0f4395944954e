"""Finds waits that last: after a minute, and each time the wait has doubled, it is reported with its reason.

Waits have deadlines where they are made, often hours ahead, because a sandbox or a version may be late for good
reasons; an operator learns of the wait after a minute. Only named waits are watched: an actor without work waits too.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

WATCHDOG_S = 60.0
"""Length at which a wait is first reported."""
_TEXTS = 3
"""Waits that one report names; the others are counted."""

What = str | Callable[[], str]
"""The reason of a wait, or a function that tells it when it is reported."""


class _Wait:
    def __init__(self, what: What, since: float) -> None:
        self.what, self.since = what, since
        self.due_s = WATCHDOG_S
        self.left: float | None = None


class Waits:
    """The named waits of one actor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[What, _Wait] = {}

    @contextlib.contextmanager
    def named(self, what: What, since: float | None = None) -> Iterator[None]:
        """A context around a wait. since: the clock's time at which it began, for a loop of short waits."""
        began = self._clock() if since is None else since
        wait = self._waits.get(what)
        if wait is None or wait.since != began:
            wait = self._waits[what] = _Wait(what, began)
        wait.left = None
        try:
            yield
        finally:
            wait.left = self._clock()

    def now(self) -> str:
        """The reasons of all waits at this moment, the oldest first; empty without any."""
        lasting = sorted((wait for wait in self._waits.values() if wait.left is None), key=lambda wait: wait.since)
        return _sentence(lasting)

    def report(self) -> tuple[str, float]:
        """The waits that have lasted for a minute, or twice as long as when they were last reported: one sentence and
        the seconds of the longest. Empty and 0.0 where there are none."""
        now = self._clock()
        self._waits = {
            what: wait for what, wait in self._waits.items() if wait.left is None or now - wait.left < WATCHDOG_S
        }
        due = [wait for wait in self._waits.values() if wait.left is None and now - wait.since >= wait.due_s]
        if not due:
            return "", 0.0
        for wait in due:
            while now - wait.since >= wait.due_s:
                wait.due_s *= 2
        due.sort(key=lambda wait: wait.since)
        longest = now - due[0].since
        return f"waiting for {longest:.0f} s: {_sentence(due)}", longest


def _sentence(waits: Sequence[_Wait]) -> str:
    """The reasons of the first waits, and the number of the others."""
    texts = [wait.what if isinstance(wait.what, str) else wait.what() for wait in waits[:_TEXTS]]
    return "; ".join(texts) + (f", and {len(waits) - _TEXTS} more" if len(waits) > _TEXTS else "")
