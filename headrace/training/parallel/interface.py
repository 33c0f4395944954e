"""The interface to the processes that compute a batch: one, or several (`group.ProcessGroup`)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import HeadraceError
from headrace.messages.weights import TensorInfo
from headrace.weights import snapshot
from headrace.weights.state import Bits

T = TypeVar("T")


class Loss(NamedTuple):
    """The end of a process of a group."""

    text: str
    alike: str = ""
    """The text without what differs between two ends of one cause, such as process ids."""
    raised: str = ""
    """The exception of a step that ended it, `ValueError: text`; empty for another end."""


class GroupError(HeadraceError):
    """The group of processes has ended; the text says why."""

    def __init__(self, text: str, alike: str | None = None) -> None:
        """alike: as in `Loss`, for the supervisor, which counts failures of one cause; empty when another failure
        tells nothing about this one. Default: the text."""
        super().__init__(text)
        self.alike = text if alike is None else alike

    def during(self, what: str) -> "GroupError":
        """The same error with the moment at which it came."""
        return GroupError(f"{what}: {self}", f"{what}: {self.alike}")


class StepRaised(GroupError):
    """A step raised an exception in a process of the group, and no process was lost: it would raise again."""

    def __init__(self, text: str, alike: str, raised: str) -> None:
        """raised: as in `Loss`."""
        super().__init__(text, alike)
        self.raised = raised


class GivenUp(HeadraceError):
    """Ends the wait for a group because its trainer is being stopped."""


class DataParallel(Protocol):
    """The processes that train on one batch together."""

    def each(self, count: int, work: Callable[[int, bool], T], kind: type[T]) -> list[T]:
        """`work(index, contributes)` for each index from 0 to count - 1; every process returns all results, in this
        order and of this type. GroupError as `Peers.gathered`.

        With contributes False a process only takes part in the collectives and adds nothing to the gradient, because
        other processes still have work.
        """


class Others(Protocol):
    """The processes of a group except the first, as that one sees them. Any thread may call these."""

    @property
    def why(self) -> str:
        """A text about the first process that ended, and its exit; empty while all run."""

    def fail(self, loss: Loss) -> None:
        """End the group for this reason, unless it has one already: a thread that waits for it raises."""


class Peers(Protocol):
    """The processes that hold a part of one policy each."""

    rank: int
    size: int

    def gathered(self, value: T, kind: type[T]) -> list[T]:
        """One value of this type of every process, in the order of ranks. All processes must call this. RuntimeError
        when one has ended, GroupError for bytes that are no such value."""

    near: int
    """Number of those on node 0, which are the first ones: the others do not see its files."""

    def writing(
        self, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]
    ) -> AbstractContextManager["Writes"]:
        """A file that has its size already, to write to. On leaving, what processes of other nodes have written
        through this one is in the file too. OSError, also of those writes. All processes must call this."""


class Writes(Protocol):
    """A file of tensors that is being written."""

    def write(self, tensor: int, start: int, part: Bits) -> None:
        """Write bits of the tensor with index `tensor` at item `start` of its flat view."""


class SingleProcess:
    """`DataParallel` and `Peers` of one process: it computes every micro-batch."""

    rank, size, near = 0, 1, 1

    def gathered(self, value: T, kind: type[T]) -> list[T]:
        """As `Peers`."""
        return [value]

    def writing(self, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]) -> snapshot.Rows:
        """As `Peers`."""
        return snapshot.Rows(path, described, about)

    def each(self, count: int, work: Callable[[int, bool], T], kind: type[T]) -> list[T]:
        """As `DataParallel`."""
        return [work(index, True) for index in range(count)]


SINGLE_PROCESS = SingleProcess()
