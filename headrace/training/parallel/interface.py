"""The interface to the processes that compute a batch: one, or several (`group.ProcessGroup`)."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class GroupError(Exception):
    """The group of processes has ended; the text says why."""


class GivenUp(Exception):
    """Ends the wait for a group because its trainer is being stopped."""


class DataParallel(Protocol):
    """The processes that train on one batch together."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """`work(index, contributes)` for each index from 0 to count - 1; every process returns all results, in this
        order.

        With contributes False a process only takes part in the collectives and adds nothing to the gradient, because
        other processes still have work.
        """


class Peers(Protocol):
    """The processes that hold a part of one policy each."""

    rank: int
    size: int

    def gathered(self, value: T) -> list[T]:
        """One value of every process, in the order of ranks. All processes must call this. RuntimeError when one has
        ended."""


class SingleProcess:
    """`DataParallel` and `Peers` of one process: it computes every micro-batch."""

    rank, size = 0, 1

    def gathered(self, value: T) -> list[T]:
        """As `Peers`."""
        return [value]

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `DataParallel`."""
        return [work(index, True) for index in range(count)]


SINGLE_PROCESS = SingleProcess()
