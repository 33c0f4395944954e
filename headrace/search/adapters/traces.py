"""Pairs from traces: the text of a semantic search, and the functions that the same attempt edited after it.

An edit counts if a later call of an editing tool names the file and no earlier call did: then the file was as in the
task when the search was made, and the attempt's diff says which functions changed. Edits by the terminal are not seen.
Attempts of users are left out, because their repositories are not stored; so are tasks with an image and attempts with
files of their own.
"""

import posixpath
import random
from collections.abc import Iterable, Mapping

import msgspec

from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Task
from headrace.search.adapters.adapter import AdapterError
from headrace.search.adapters.learning import Place, Query, Workspace, place
from headrace.search.chunks import Chunk, Work, WorkExceeded, cut, indexed

SEARCH, EDITORS = "semantic_search", ("edit", "edit_file", "write_file")
LEAST_REPOSITORIES = 10
"""Repositories with pairs below which nothing is learnt: an interval over fewer than five held out means little."""
SAME = 0.5
"""Share of a task's chunks in a repository from which the task is counted to it."""


def usable(trajectory: Trajectory, task: Task) -> bool:
    """Whether the attempt is no user's (their groups are named ``<user>.<id>``, in a branch too), and its workspace at
    its beginning is the task's files."""
    users = trajectory.lane == "production" or trajectory.capture is not None or "." in trajectory.group
    return not users and not trajectory.altered and bool(task.files) and not task.image


def queries(trajectory: Trajectory, task: Task) -> list[Query]:
    """The searches of one attempt that an edit followed."""
    calls = [
        (call.name, call.arguments)
        for turn in trajectory.turns
        for call, result in zip(turn.calls, turn.results, strict=False)
        if result.ok and call.name in (SEARCH, *EDITORS)
    ]
    first_edit: dict[str, int] = {}
    for at, (name, arguments) in enumerate(calls):
        if name in EDITORS:
            first_edit.setdefault(posixpath.normpath(arguments.get("path", "")), at)
    pairs = []
    for at, (name, arguments) in enumerate(calls):
        paths = [
            path for path, edit in first_edit.items() if edit > at and path in trajectory.diff and path in task.files
        ]
        wanted = frozenset(where for path in paths for where in changed(path, task.files, trajectory.diff))
        if name == SEARCH and wanted:
            pairs.append(Query(arguments["query"], wanted))
    return pairs


def changed(path: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> set[Place]:
    """The functions of a file that are changed or gone; where there is none, its other text that is."""
    stay = {chunk.hash() for chunk in _chunks({path: after[path]})}
    edited = [chunk for chunk in _chunks({path: before[path]}) if chunk.hash() not in stay]
    return {place(chunk) for chunk in edited if chunk.name} or {place(chunk) for chunk in edited}


class Traces:
    """The pairs of many attempts, by task."""

    def __init__(self) -> None:
        self._tasks: dict[str, Workspace] = {}
        self.attempts = 0

    def add(self, trajectory: Trajectory, task: Task) -> None:
        """Take the pairs of an attempt; the same pair of another attempt at the task counts once."""
        if not usable(trajectory, task) or not (made := queries(trajectory, task)):
            return
        self.attempts += 1
        name = f"{task.ref.suite}/{task.ref.task}"
        workspace = self._tasks.setdefault(name, Workspace(name, task.files, []))
        workspace.queries = list(dict.fromkeys([*workspace.queries, *made]))

    def split(self) -> tuple[list[Workspace], list[Workspace]]:
        """The workspaces to learn from, and those held out: every second repository of a fixed random order.
        AdapterError for too few repositories."""
        repositories = _by_repository(workspace for _, workspace in sorted(self._tasks.items()))
        if len(repositories) < LEAST_REPOSITORIES:
            raise AdapterError(
                f"expected pairs of at least {LEAST_REPOSITORIES} repositories, got {len(repositories)} (from "
                f"{self.attempts} passed attempts that searched before an edit): name more runs"
            )
        random.Random(5).shuffle(repositories)
        learnt, held_out = ([each for part in repositories[at::2] for each in part] for at in (0, 1))
        return learnt, held_out


def _by_repository(workspaces: Iterable[Workspace]) -> list[list[Workspace]]:
    """Workspaces that share most of their chunks are states of one repository, which is named after the first."""
    repositories: list[tuple[set[str], list[Workspace]]] = []
    for workspace in workspaces:
        chunks = {chunk.hash() for chunk in _chunks(workspace.files)}
        for held, states in repositories:
            if len(chunks & held) >= SAME * len(chunks):
                held.update(chunks)
                states.append(msgspec.structs.replace(workspace, repository=states[0].repository))
                break
        else:
            repositories.append((chunks, [workspace]))
    return [states for _, states in repositories]


def _chunks(files: Mapping[str, bytes]) -> list[Chunk]:
    """The chunks of files, as far as an index has them."""
    work, chunks = Work(), list[Chunk]()
    try:
        for path in sorted(files):
            chunks += cut(path, files[path], work) if indexed(path) else []
    except WorkExceeded:
        pass
    return chunks
