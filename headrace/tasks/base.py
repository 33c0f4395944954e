"""A suite: tasks under one name, each with the agent's side and the judge's side."""

from collections.abc import Sequence
from typing import Protocol

from headrace.messages.tasks import Oracle, Task


class UnknownSuite(Exception):
    """There is no such suite or task; the text says which and what there is."""


class Suite(Protocol):
    """Tasks under one name."""

    @property
    def name(self) -> str:
        """As `open_suite` knows it."""

    def ids(self) -> Sequence[str]:
        """All task ids in order; may be far too many to list."""

    def task(self, id: str) -> Task:
        """The agent's side. UnknownSuite when the id is not of this suite."""

    def oracle(self, id: str) -> Oracle:
        """The judge's side. UnknownSuite as in `task`."""
