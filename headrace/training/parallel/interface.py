"""The processes that compute a batch: one, or several that share its micro-batches (`group.ProcessGroup`)."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class GroupError(Exception):
    """The group of processes has ended; the text says why."""


class DataParallel(Protocol):
    """The processes that train on one batch together."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """The results of `work` for each of 0 .. count - 1, in this order, in every process.

        False as the second argument: take part in the collectives without a contribution to the gradient, because other
        processes still have work.
        """


class SingleProcess:
    """`DataParallel` of one process: it computes every micro-batch."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `DataParallel`."""
        return [work(index, True) for index in range(count)]


SINGLE_PROCESS: DataParallel = SingleProcess()
