"""Reads ahead: the next few reads run while the result of the first is used."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A context in which reads run in order, `count` at once. Its end cancels those that are not used."""

    def __init__(self, reads: Iterable[Callable[[], Coroutine[Any, Any, T]]], count: int) -> None:
        self._reads, self._count = iter(reads), count
        self._running: deque[asyncio.Task[T]] = deque()

    def next(self) -> "asyncio.Task[T]":
        """The task of the next read. IndexError after the last one."""
        missing = self._count - len(self._running)
        self._running.extend(asyncio.create_task(read()) for read in itertools.islice(self._reads, missing))
        return self._running.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
