"""A candidate: a trajectory with both sides of its task, and the repository that its tests run in."""

from collections.abc import Mapping, Sequence

import msgspec

from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import HOST_FOLDER, Oracle, Task
from headrace.vmhost.guest.globs import matches


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task."""

    trajectory: Trajectory
    task: Task
    oracle: Oracle


def allowed_part(
    task: Task, diff: Mapping[str, bytes], deleted: Sequence[str]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The changed and deleted paths that the task allows. The trajectory's own claim about them is not trusted."""

    def allowed(path: str) -> bool:
        inside = not path.startswith(("/", HOST_FOLDER)) and ".." not in path.split("/")
        return inside and any(matches(pattern, path, True) for pattern in task.allowed)

    changed = {path: content for path, content in diff.items() if allowed(path)}
    return changed, tuple(path for path in deleted if allowed(path))


def repository(task: Task, oracle: Oracle, diff: Mapping[str, bytes], deleted: Sequence[str]) -> dict[str, bytes]:
    """The files to be tested: the task's, the allowed changes, and the hidden tests on top of all. Of a task with
    separate tests, without the rest of the repository."""
    changed, gone = allowed_part(task, diff, deleted)
    given = {} if oracle.separate else task.files
    files = {path: content for path, content in given.items() if path not in gone}
    return files | changed | oracle.hidden | oracle.sealed
