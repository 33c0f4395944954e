"""A task as data: the agent's part, and the part that only the judge reads."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.messages.base import Count, Finite, Integer, Message, message

HOST_FOLDER = ".headrace/"
"""Folder of a workspace that only the judge writes: test scripts, their logs, reward files."""
PROGRAM = f"{HOST_FOLDER}solve"
"""The path of a known solution's program while it runs. `HOST_FOLDER` is removed before the changes are read."""
ANSWER = "answer.txt"
"""The path in a trajectory's diff under which the last message of an episode without a sandbox stands."""

DEFAULT_TOOLS = (
    "search",
    "read_file",
    "list_files",
    "edit_file",
    "edit",
    "write_file",
    "run_tests",
    "terminal",
    "terminal_session",
    "lint",
    "semantic_search",
    "todo",
    "finish",
)
"""The tools of a task that names none. Where a run has no search service, keyword_search takes the place of
semantic_search."""


LONGEST_TEST_S = 86_400.0
"""An endless limit would hold a judge's sandbox for ever."""
LEAST_MEMORY_MIB = 64
"""A smaller sandbox cannot start the program that serves its calls."""


class TaskRef(msgspec.Struct, frozen=True):
    """Names a task: the suite as `headrace.tasks.open_suite` knows it, and the task's id inside it."""

    suite: str
    task: str


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The most that a sandbox may use; 0: as the node's configuration says."""

    vcpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Processors. A node with fewer gives all that it has."""
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """0, or at least `LEAST_MEMORY_MIB`; ValueError."""
    disk_mib: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    """Files that its programs write, in an image. They lie in the sandbox's memory and count there as well; a limit of
    more than three quarters of the memory gives the sandbox a disk of that size."""
    time_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """Duration of an episode, in place of `[limits] wall_s`. The tests have a limit of their own (`TestPlan`)."""

    def __post_init__(self) -> None:
        if 0 < self.memory_mib < LEAST_MEMORY_MIB:
            raise ValueError(
                f"memory_mib of a sandbox: expected 0, for the node's own, or at least {LEAST_MEMORY_MIB}, "
                f"got {self.memory_mib}"
            )

    def over(self, defaults: "SandboxLimits") -> "SandboxLimits":
        """These limits, and the defaults where there is none."""
        mine = {name: value for name in self.__struct_fields__ if (value := getattr(self, name))}
        return msgspec.structs.replace(defaults, **mine)

    def of_machine(self) -> "SandboxLimits":
        """Those that a backend enforces."""
        return msgspec.structs.replace(self, time_s=0.0)

    def needs(self) -> set[str]:
        """Names of the capabilities that a backend needs to enforce them (vmhost/backend.py)."""
        wanted = {"limit_vcpus": self.vcpus, "limit_memory": self.memory_mib, "limit_disk": self.disk_mib}
        return {name for name, value in wanted.items() if value}


class Change(msgspec.Struct, frozen=True):
    """One path of a tree besides the contents of its files, or one changed path of an image. Paths are relative to the
    workspace, or absolute outside it."""

    path: str
    kind: Literal["gone", "file", "folder", "link", "other"]
    """``gone``: the entry was removed. Otherwise: its present kind. An ``other`` entry cannot be made again."""
    mode: Count = 0
    target: str = ""
    """Target of a link."""


Entries = tuple[Change, ...] | UnsetType
"""Links, empty folders and executable files of a tree, beside the contents of its files. A file without an entry has
the mode 0644. Unset where there is none, and then not encoded, so that certificates of older tasks stay valid."""


class TestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a repository's tests run.

    kind ``functions``: plain ``test_*`` functions of the named files, run by the prepared worker (tens of CPU-ms);
    ``pytest``: the same worker calls pytest; ``command``: argv, judged by a JUnit-style report or exit code.
    """

    kind: Literal["functions", "pytest", "command"] = "functions"
    paths: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    timeout_s: Annotated[float, Meta(ge=0.0, le=LONGEST_TEST_S)] = 30.0
    """Above 0 and at most `LONGEST_TEST_S`; ValueError. It is checked here, because plugins make tasks in code."""
    prepare: tuple[str, ...] | UnsetType = UNSET
    """In an image: a command that the judge runs as root before `argv`, which runs as the image's user. Where it fails,
    no test runs. Unset it is not encoded, as with `Task.limits`."""

    def __post_init__(self) -> None:
        if not 0.0 < self.timeout_s <= LONGEST_TEST_S:
            wanted = f"seconds above 0 and at most {LONGEST_TEST_S:g}"
            raise ValueError(f"timeout_s of tests: expected {wanted}, got {self.timeout_s!r:.80}")


class CheatRule(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern of a suite: its matches are reported with the Score and take no reward."""

    name: str
    severity: Literal["note", "zero"] = "note"
    """Without effect; up to judge j6 a match of ``zero`` voided a pass."""
    pattern: str = ""
    """Regular expression over a changed file; it matches where a diff adds an occurrence."""


class Criterion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statement about an attempt that a rubric judge finds met or not."""

    id: str
    text: str
    """One atomic statement, such as "The change touches no file that the task does not name"."""
    weight: Finite = 1.0
    pitfall: bool = False
    """A statement that should not hold: its weight is subtracted when it is met."""


class Grading(msgspec.Struct, frozen=True, kw_only=True):
    """How an examination becomes a pass.

    ``exact``: exactly the tests of `Oracle.expected` are reported, all passed. ``f2p_p2p``: those of `Oracle.expected`
    passed and those of `pass_to_pass` passed or were skipped; others are reported and do not count. ``all_tests``: at
    least one passed and none failed. ``exit_code``: the command ended with 0. ``reward_file``: the command wrote a
    number of at least `passes_at` to `file`. ``checker``: the function `checker` gave at least `passes_at` for the
    policy's last message; no sandbox is used.
    """

    kind: Literal["exact", "f2p_p2p", "all_tests", "exit_code", "reward_file", "checker"] = "exact"
    pass_to_pass: tuple[str, ...] = ()
    parser: str = ""
    """Parser of the command's log (judging/logs); empty: the sandbox reports the tests."""
    file: str = ""
    """The log that the parser reads, or the reward file; empty: the command's output."""
    passes_at: Finite = 1.0
    lowest: Finite | UnsetType = UNSET
    """The smallest number of a reward file: smaller ones count as this one, and an attempt that ends in no honest way
    earns it. Unset it is 0 and not encoded, so certificates of tasks without it stay valid."""
    checker: str = ""
    """A name of the registry `headrace.checkers`, or ``module:attribute``."""
    reference: dict[str, str] = {}
    """The checker's data, such as ``answer``."""
    trust: Literal["report", "log"] = "report"
    """``log``: tests that nobody can alter are read from printed lines, which the candidate can forge. Training on it
    needs `[tasks] at_risk`."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A later step of a task, which begins when the agent has finished the step before it."""

    prompt: str
    files: dict[str, bytes] = {}
    """Written into the workspace when the step begins."""
    entries: Entries = UNSET
    """Made after them."""


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
    system: str = ""
    """The suite's own instructions to the agent; they stand before the prompt."""
    sandbox: bool = True
    """False: the episode is one message of the policy, without tools and without a sandbox."""
    trust: Literal["report", "log"] = "report"
    """Copy of `Grading.trust`, for actors that may not read the oracle."""
    limits: SandboxLimits | UnsetType = UNSET
    """Limits of its sandboxes, the agent's and the judge's. Unset it is not encoded, so certificates of tasks without
    limits stay valid."""

    lint: tuple[str, ...] | UnsetType = UNSET
    """The image's own linter for the tool `lint`: a program of the sandbox and its arguments, run in the repository. A
    call that names a glob adds the matching paths. Unset: `[tools] lint`, and where that is empty ruff or the check in
    harness/tools/process/lint.py. Unset it is not encoded, as with `limits`."""

    web_search: str | UnsetType = UNSET
    """Address of a search service for the tool `web_search`, with ``{query}`` where the query stands. `network` must
    list its host. Unset: `[tools] web_search`. Unset it is not encoded, as with `limits`."""

    steps: tuple[Step, ...] | UnsetType = UNSET
    """The later steps of a task with steps, in order; `prompt` is the first one's. Unset it is not encoded, as with
    `limits`."""

    entries: Entries = UNSET
    """Of the repository, beside `files`."""

    @property
    def later(self) -> tuple[Step, ...]:
        """The steps after the first one; none where the task has one instruction."""
        return self.steps or ()

    @property
    def sandbox_limits(self) -> SandboxLimits:
        """The limits of its sandboxes; no limits of its own where it sets none."""
        return self.limits or SandboxLimits()

    @property
    def machine(self) -> str:
        """The image, or the template of a task without one: the name that a sandbox is asked for by."""
        return self.image or self.template


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that a verifier with an image of its own gets from the attempt's."""

    path: str
    """Absolute, the same in both images."""
    exclude: tuple[str, ...] = ()
    """Patterns of paths below a folder that are left out, as of ``tar --exclude``."""


class Verifier(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox of tests that run in an image of their own. All paths of the tests are relative to its root."""

    image: str
    """As `Task.image`."""
    artifacts: tuple[Artifact, ...]
    """All that it gets of the attempt. An artifact that the attempt lacks is left out."""
    limits: SandboxLimits = SandboxLimits()


class StepTests(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's part of one step: fields of an Oracle, of which each step has its own, and the step's condition."""

    name: str
    hidden: dict[str, bytes]
    tests: TestPlan
    script: str = ""
    separate: bool = False
    allowed: tuple[str, ...] = ("**",)
    """Globs of the changed paths that its tests get, among those of the task."""
    verifier: Verifier | UnsetType = UNSET
    min_reward: dict[str, Finite] = {}
    """Least values of the reward file's numbers, by key; an attempt below one earns nothing in later steps."""
    entries: Entries = UNSET
    """Of `hidden`."""
    solution: dict[str, bytes] | UnsetType = UNSET
    """Files that `script` runs or reads, as `Oracle.solution`. Unset it is not encoded, as with `Task.limits`."""
    solution_entries: Entries = UNSET


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's part of a task with steps."""

    tests: tuple[StepTests, ...]
    """One for each step, in order."""
    reward: Literal["mean", "final"] = "mean"
    """The attempt's reward: the mean of the steps' rewards, or the reward of the last step."""


@message("oracle")
class Oracle(Message, frozen=True, kw_only=True):
    """The judge's part of a task: hidden tests, the ids they must report, and a known solution."""

    ref: TaskRef
    hidden: dict[str, bytes]
    """Test files that the host pushes at judging time; they replace any file of the agent's at their paths. An entry
    of `entries` that is ``gone`` is a path that the hidden tests lack."""
    tests: TestPlan
    expected: tuple[str, ...]
    """Test ids that have to be reported as passed; a missing or other id is a failure."""
    sealed: dict[str, bytes] = {}
    """Hidden files as the judge runs them, without the literals that they compare with (tasks/sealing.py)."""
    answers: dict[str, tuple[tuple[Integer, str], ...]] = {}
    """Test id to its comparisons in order, each with the literal that was removed from it."""
    solution: dict[str, bytes]
    """Files that pass the hidden tests: for the scripted oracle policy, and to verify the task. Those below
    `HOST_FOLDER` are there while `script` runs, and are no part of the solution's changes."""
    removed: tuple[str, ...] = ()
    """Paths that the solution deletes."""
    script: str = ""
    """A program that solves the task, where the solution is a program rather than files (`interpreter`)."""
    answer: str = ""
    """The message that solves a task without a sandbox."""
    grading: Grading = Grading()
    cheating: tuple[CheatRule, ...] = ()
    """Patterns that the suite's people want to be told of, on top of the judge's own."""
    rubric: tuple[Criterion, ...] = ()
    """Criteria of this task, beside those of `[judge] rubric`."""
    separate: bool = False
    """The tests run beside the files of the allowed paths alone, without the rest of the repository."""
    verifier: Verifier | UnsetType = UNSET
    """The tests run in an image of their own. Unset it is not encoded, as with `Task.limits`."""
    steps: Steps | UnsetType = UNSET
    """The tests of a task with steps, in place of `hidden`, `tests`, `script`, `separate` and `verifier`. Unset it is
    not encoded, as with `Task.limits`."""
    entries: Entries = UNSET
    """Of `hidden`."""
    solution_entries: Entries = UNSET
    """Of `solution`: the links, folders and modes that it makes."""
    left_out: tuple[str, ...] | UnsetType = UNSET
    """Notes of the import about files and settings that the task lacks, for its certificate. Unset it is not encoded,
    as with `Task.limits`."""


def interpreter(script: str) -> tuple[str, ...]:
    """The program that runs a known solution's script, with its arguments: the one that its first line names, or
    ``sh``."""
    first = script.partition("\n")[0].rstrip("\r")
    words = first[2:].split() if first.startswith("#!") else []
    return tuple(words) or ("sh",)
