"""A suite: tasks under one name, each with the agent's side and the judge's side."""

from collections.abc import Sequence
from typing import Literal, Protocol

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.tasks import Oracle, Task

Trust = Literal["report", "log"]
"""``log``: only what the candidate's own programs print decides (`Grading.trust`)."""


class UnknownSuite(HeadraceError, LookupError, exit_status=WRONG_INPUT):
    """There is no such suite or task; the text says which and what there is."""


class Suite(Protocol):
    """Tasks under one name."""

    @property
    def name(self) -> str:
        """The suite's name for `open_suite`."""

    def ids(self) -> Sequence[str]:
        """All task ids in order, as a sequence that may be too long for a list."""

    def task(self, id: str) -> Task:
        """The agent's side. UnknownSuite when the id is not of this suite."""

    def oracle(self, id: str) -> Oracle:
        """The judge's side. UnknownSuite as in `task`."""


def both_sides(suite: Suite, id: str) -> tuple[Task, Oracle]:
    """The task and its oracle. UnknownSuite also when the suite, which may come from outside, raises anything else."""
    try:
        return suite.task(id), suite.oracle(id)
    except UnknownSuite:
        raise
    except Exception as error:
        text = f"suite {suite.name}: task {id!r} cannot be made: {type(error).__name__}: {error}"
        raise UnknownSuite(text) from error


def trust_of(suite: Suite) -> Trust:
    """``log`` where a task of the suite says so; a suite without the attribute ``trust`` reports its tests."""
    trust: Trust = getattr(suite, "trust", "report")
    return trust


def try_first(suite: Suite) -> None:
    """UnknownSuite when the suite's first task cannot be made: before a run, instead of a failure of every attempt."""
    if ids := suite.ids():
        both_sides(suite, ids[0])
