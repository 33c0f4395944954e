"""The interface to the processes that compute a batch: one, or several (`group.ProcessGroup`)."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class GroupError(Exception):
    """The group of processes has ended; the text says why."""


class DataParallel(Protocol):
    """The processes that train on one batch together."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """`work(index, contributes)` for each index from 0 to count - 1; every process returns all results, in this
        order.

        With contributes False a process only takes part in the collectives and adds nothing to the gradient, because
        other processes still have work.
        """


class SingleProcess:
    """`DataParallel` of one process: it computes every micro-batch."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `DataParallel`."""
        return [work(index, True) for index in range(count)]


SINGLE_PROCESS: DataParallel = SingleProcess()
