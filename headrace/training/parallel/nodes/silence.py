"""Ends a group in which nothing moves while an order runs.

The idea: every collective of a process waits for all others, so a process that hangs soon stops the first one too. That
one marks its progress: each collective that ends, each forward pass that begins, each block of a checkpoint that is
read or written. When an order runs and no mark comes for `[trainer] stall_s`, the group ends. The opening of the ranks,
in which they load the checkpoint, counts as an order. The wait for a record of the broker is no part of an order, and
between two orders nothing is watched.

Looks are counted and not seconds, so the time in which this process itself is stopped does not count.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 1.0
"""Longest time between two looks, in seconds."""


class Silence:
    """Watches the orders of one group. `mark` may be called by any thread."""

    def __init__(self, limit_s: float, silent: Callable[[str], None]) -> None:
        """silent: gets the names of the orders that run, once, when no mark has come for `limit_s` seconds."""
        self._limit_s, self._silent = limit_s, silent
        self._marks = 0
        self._main = ""
        self._paused = False
        self._beside: list[str] = []
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="silence", daemon=True).start()

    def mark(self) -> None:
        """Something has moved."""
        self._marks += 1

    @property
    def busy(self) -> bool:
        """Whether an order of the first process's main thread runs."""
        return bool(self._main)

    @contextmanager
    def order(self, name: str) -> Iterator[None]:
        """An order runs in this block. An order within another one counts as a part of it."""
        outer, self._main = self._main, self._main or name
        self.mark()
        try:
            yield
        finally:
            self._main = outer
            self.mark()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The order waits in this block for something that is no process of the group."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.mark()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Orders in this block are no parts of the one around it, and between them nothing is watched."""
        outer, self._main = self._main, ""
        try:
            yield
        finally:
            self._main = outer
            self.mark()

    def beside(self, name: str) -> Callable[[], None]:
        """Work of another thread begins; call the returned function at its end."""
        self._beside.append(name)
        self.mark()
        return lambda: self._beside.remove(name)

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        period = min(LOOK_S, self._limit_s / 10)
        looks, seen = 0, -1
        while not self._closed.wait(period):
            running = [*([self._main] if self._main and not self._paused else []), *self._beside]
            looks = looks + 1 if running and self._marks == seen else 0
            seen = self._marks
            if looks * period >= self._limit_s:
                self._silent(" and ".join(running))
                return
