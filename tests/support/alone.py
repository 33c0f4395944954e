"""Suites of one task each: `headrace check` makes the sample of three generated ones in half a second of processor
time."""

from pathlib import Path

from headrace.messages.tasks import Oracle, Task, TaskRef
from tests.support.records import of


class Alone:
    """A suite with one task."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ids(self) -> list[str]:
        return ["0"]

    def task(self, id: str) -> Task:
        return of(Task, ref=TaskRef(self.name, id), prompt=self.name)

    def oracle(self, id: str) -> Oracle:
        return of(Oracle, ref=TaskRef(self.name, id))


def open_alone(name: str, root: Path) -> Alone:
    return Alone(name)


SUITES: dict[str, object] = {f"tasks.{key}": f"{__name__}:open_alone/{key}" for key in ("suite", "heldout", "unseen")}
"""Settings of a run with such suites; it needs `tasks.uncertified` as well."""
