"""A task as data: the agent's part, and the part that only the judge reads."""

from typing import Literal

import msgspec

from headrace.messages.base import Message, message

CANARY = "canary/"
"""Prefix of a suite's name: its tasks, made unsolvable (tasks/impossible.py)."""

DEFAULT_TOOLS = (
    "search",
    "read_file",
    "list_files",
    "edit_file",
    "write_file",
    "run_tests",
    "terminal",
    "lint",
    "keyword_search",
    "finish",
)
"""The tools of a task that names none."""


class TaskRef(msgspec.Struct, frozen=True):
    """Names a task: the suite as `headrace.tasks.open_suite` knows it, and the task's id inside it."""

    suite: str
    task: str

    @property
    def canary(self) -> bool:
        """Whether the task is unsolvable."""
        return self.suite.startswith(CANARY)


class TestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a repository's tests run.

    kind ``functions``: plain ``test_*`` functions of the named files, run by the prepared worker (tens of CPU-ms);
    ``pytest``: the same worker calls pytest; ``command``: argv, judged by a JUnit-style report or exit code.
    """

    kind: Literal["functions", "pytest", "command"] = "functions"
    paths: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    timeout_s: float = 30.0


@message("task")
class Task(Message, frozen=True, kw_only=True):
    """The agent's part of a task. Nothing in it tells the answer."""

    ref: TaskRef
    family: str
    """The kind of task, for reports (``one_line``, ``multi_line``, ``mutation:more-itertools`` ...)."""
    prompt: str
    files: dict[str, bytes]
    """The repository: path to content, paths relative and without ``..``."""
    allowed: tuple[str, ...]
    """Glob patterns of the paths whose changes are extracted; all others are ignored by the judge."""
    tests: TestPlan
    network: tuple[str, ...] = ()
    """Addresses that the agent's sandbox may reach, as in `Acquire.network`; the judge's sandbox reaches none."""
    template: str = "light"
    """The vmhost template that the sandbox is cloned from."""
    image: str = ""
    """The container image of the sandbox, instead of `template`: its name in the node's image store, a reference such
    as ``docker.io/org/app:1``, or its digest."""
    repository: str = ""
    """The repository's folder in the image, absolute; empty: the image's working directory. All paths of the task are
    relative to it."""
    tools: tuple[str, ...] = ()
    """The tools that the agent is offered, in the order of its prompt: names of the registry of harness/tools, or
    ``module:attribute``. Empty: `DEFAULT_TOOLS`."""

    @property
    def machine(self) -> str:
        """The image, or the template of a task without one: the name that a sandbox is asked for by."""
        return self.image or self.template


@message("oracle")
class Oracle(Message, frozen=True, kw_only=True):
    """The judge's part of a task: hidden tests, the ids they must report, and a known solution."""

    ref: TaskRef
    hidden: dict[str, bytes]
    """Test files that the host pushes at judging time; they replace any file of the agent's at their paths."""
    tests: TestPlan
    expected: tuple[str, ...]
    """Test ids that have to be reported as passed; a missing or other id is a failure."""
    sealed: dict[str, bytes] = {}
    """Hidden files as the judge runs them, without the literals that they compare with (tasks/sealing.py)."""
    answers: dict[str, tuple[tuple[int, str], ...]] = {}
    """Test id to its comparisons in order, each with the literal that was removed from it."""
    solution: dict[str, bytes]
    """Files that pass the hidden tests: for the scripted oracle policy, and to verify the task."""
