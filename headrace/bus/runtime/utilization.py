"""The share of its time in which an actor works: for operators, and for the report's timeline.

A handler works from its start to its end, minus what it spends inside `waiting`. A background task counts from its
first `waiting` on (a loop that never waits for input, such as a ticker, does not count at all). The actor is busy while
at least one of them works.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from weakref import WeakSet

_inside: ContextVar[bool] = ContextVar("headrace_working", default=False)


class Utilization:
    """A stopwatch shared by several tasks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._working = clock, 0
        self._since = self._taken = clock()
        self._total = 0.0
        self._known: WeakSet[asyncio.Task[object]] = WeakSet()

    def _change(self, by: int) -> None:
        now = self._clock()
        if self._working > 0:
            self._total += now - self._since
        self._since = now
        self._working += by

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A context around a handler: the handler is counted from its start to its end."""
        token = _inside.set(True)
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)
            _inside.reset(token)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around waiting, in a handler or in a background task: this time does not count."""
        task = asyncio.current_task()
        if not _inside.get() and task is not None and task not in self._known:
            self._known.add(task)
            self._change(1)
            task.add_done_callback(lambda _: self._change(-1))
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    def take(self) -> float:
        """Share of the time since the last `take`, 0 to 1."""
        self._change(0)
        now = self._clock()
        span, total = now - self._taken, self._total
        self._taken, self._total = now, 0.0
        return min(1.0, total / span) if span > 0 else 0.0
