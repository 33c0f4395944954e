"""A task as data: what the agent sees, and what only the judge may see."""

from typing import Literal

import msgspec

from headrace.messages.base import Message, message

CANARY = "canary/"
"""Before the name of a suite: its tasks made unsolvable (tasks/canaries.py)."""


class TaskRef(msgspec.Struct, frozen=True):
    """Names a task: the suite as `headrace.tasks.open_suite` knows it, and the task's id inside it."""

    suite: str
    task: str

    @property
    def canary(self) -> bool:
        """Whether nobody can solve it."""
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
    """The agent's side of a task: nothing in it tells the answer."""

    ref: TaskRef
    family: str
    """Which kind of task, for reports (``one_line``, ``multi_line``, ``mutation:more-itertools`` ...)."""
    prompt: str
    files: dict[str, bytes]
    """The repository: path to content, paths relative and without ``..``."""
    allowed: tuple[str, ...]
    """Glob patterns of the paths whose changes are extracted; all others are ignored by the judge."""
    tests: TestPlan
    network: tuple[str, ...] = ()
    """What the agent's sandbox may reach, as in `Acquire.network`; the judge's reaches nothing."""
    template: str = "light"
    """Which vmhost template the sandbox is cloned from."""


@message("oracle")
class Oracle(Message, frozen=True, kw_only=True):
    """The judge's side: hidden tests, the names they must report, and a known solution."""

    ref: TaskRef
    hidden: dict[str, bytes]
    """Test files that come from the host at judging time and replace whatever the agent left at their paths."""
    tests: TestPlan
    expected: tuple[str, ...]
    """Test ids that have to be reported as passed: fewer, or others, is a failure."""
    sealed: dict[str, bytes] = {}
    """Hidden files as the judge runs them: without the literals that they compare with (tasks/sealing.py)."""
    answers: dict[str, tuple[tuple[int, str], ...]] = {}
    """Test id to the comparisons that it makes, in order, and the literals that were taken out of them."""
    solution: dict[str, bytes]
    """File contents that pass the hidden tests; used by the scripted oracle policy and to verify the task."""
