"""The journal of a suite that is being made: the outcome of every candidate, so that an interrupted call continues."""

from pathlib import Path

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.judging import Certificate
from headrace.messages.tasks import Oracle, Task
from headrace.tasks import certificates
from headrace.tasks.suites import FolderSuite, write_index, write_task

FILE = "made.jsonl"


class NoTask(HeadraceError):
    """A candidate makes no task; the text says why."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate: refused, or a task with its certificate."""

    id: str
    origin: str
    """The package or the repository."""
    refused: str = ""
    certificate: Certificate | None = None


class Journal:
    """The candidates of a suite, on disk."""

    def __init__(self, name: str, root: Path) -> None:
        self._name, self._root, self._folder = name, root, root / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self.lines: dict[str, Line] = {}
        path = self._folder / FILE
        for data in path.read_bytes().splitlines() if path.exists() else []:
            try:
                line = msgspec.json.decode(data, type=Line)
            except msgspec.DecodeError:  # cut off
                continue
            self.lines[line.id] = line

    def tasks(self, origin: str) -> int:
        """How many tasks of a package or a repository there are."""
        return sum(line.origin == origin and line.certificate is not None for line in self.lines.values())

    def refuse(self, id: str, origin: str, reason: str) -> None:
        """Write down a candidate that makes no task."""
        self._write(Line(id=id, origin=origin, refused=reason))

    def keep(self, origin: str, task: Task, oracle: Oracle, certificate: Certificate) -> None:
        """Write a certified task."""
        write_task(self._folder, task, oracle)
        self._write(Line(id=task.ref.task, origin=origin, certificate=certificate))

    def _write(self, line: Line) -> None:
        with (self._folder / FILE).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        self.lines[line.id] = line

    def finish(self, source: str) -> FolderSuite | None:
        """Write index and certificates over the tasks so far; None without any."""
        made = [line.certificate for line in self.lines.values() if line.certificate is not None]
        if not made:
            return None
        suite = write_index(self._name, self._folder, [each.task.task for each in made], source, "report")
        certificates.write(suite, made, self._root / "certificates")
        return suite


class Single:
    """A suite of one task that is not written yet."""

    def __init__(self, task: Task, oracle: Oracle) -> None:
        self.name, self._task, self._oracle = task.ref.suite, task, oracle

    def ids(self) -> tuple[str, ...]:
        """The task's."""
        return (self._task.ref.task,)

    def task(self, id: str) -> Task:
        """The agent's side."""
        return self._task

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        return self._oracle
