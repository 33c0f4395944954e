"""Suites as folders, for tests."""

from collections.abc import Sequence
from pathlib import Path

from headrace.messages.tasks import Oracle, Task
from headrace.tasks.base import Trust
from headrace.tasks.suites import FolderSuite, write_index, write_task


def write_suite(name: str, folder: Path, pairs: Sequence[tuple[Task, Oracle]], source: str) -> FolderSuite:
    """Write a folder suite; the index comes last, so a half-written folder is not a suite."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, oracle in pairs:
        write_task(folder, task, oracle)
    trust: Trust = "log" if any(oracle.grading.trust == "log" for _, oracle in pairs) else "report"
    return write_index(name, folder, [task.ref.task for task, _ in pairs], source, trust)
