"""A candidate: a trajectory with both sides of its task, and the repository that its tests run in."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from headrace.judging.hidden.setup import SetUp
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import ApplyChanges
from headrace.messages.tasks import HOST_FOLDER, Change, Oracle, Task
from headrace.vmhost.guest.globs import allowed


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task."""

    trajectory: Trajectory
    task: Task
    oracle: Oracle


def allowed_part(
    task: Task, diff: Mapping[str, bytes], deleted: Sequence[str]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The changed and deleted paths that the task allows. The trajectory's own claim about them is not trusted."""

    changed = {path: content for path, content in diff.items() if _allowed(task, path)}
    return changed, tuple(path for path in deleted if _allowed(task, path))


def _allowed(task: Task, path: str) -> bool:
    return not f"{path}/".startswith(HOST_FOLDER) and allowed(task.allowed, path)


def repository(task: Task, oracle: Oracle, diff: Mapping[str, bytes], deleted: Sequence[str]) -> dict[str, bytes]:
    """The files to be tested: the task's, the allowed changes outside of the tests' set-up, and the hidden tests on top
    of all. For a task with separate tests the task's own files at other paths than the allowed ones are left out."""
    changed, gone = allowed_part(task, diff, deleted)
    setup = SetUp(task, oracle)
    changed = {path: content for path, content in changed.items() if not setup.keeps(path, content)}
    gone = tuple(path for path in gone if not setup.keeps(path, None))
    given = {path: content for path, content in task.files.items() if not oracle.separate or _allowed(task, path)}
    files = {path: content for path, content in given.items() if path not in gone} | changed
    other = {entry.path for entry in oracle.entries or () if entry.kind != "file"}
    return {path: content for path, content in files.items() if path not in other} | oracle.hidden | oracle.sealed


def repository_entries(task: Task, oracle: Oracle, trajectory: Trajectory, files: Mapping[str, bytes]) -> list[Change]:
    """The links, empty folders and modes of the tested repository: entries of the task, the candidate's allowed changes
    outside of the tests' set-up, and entries of the hidden tests. files: what `repository` returns; an entry that
    contradicts them is left out."""
    changed, gone = allowed_part(task, trajectory.diff, trajectory.deleted)
    given = {entry.path: entry for entry in task.entries or () if not oracle.separate or _allowed(task, entry.path)}
    entries = {
        path: entry
        for path, entry in given.items()
        if path not in gone and (entry.kind == "file" or path not in changed)
    }
    setup = SetUp(task, oracle)
    for change in trajectory.changes:
        if change.kind in ("gone", "other") or setup.keeps(
            change.path, trajectory.diff.get(change.path) if change.kind == "file" else None
        ):
            continue
        if not change.path.startswith("/") and _allowed(task, change.path):
            mode = 0o755 if change.mode & 0o100 or change.kind != "file" else 0o644
            entries[change.path] = msgspec.structs.replace(change, mode=mode)
    hidden = oracle.hidden.keys() | oracle.sealed.keys()
    entries = {path: entry for path, entry in entries.items() if path not in hidden}
    entries |= {entry.path: entry for entry in oracle.entries or ()}
    folders = {str(parent) for path in (*files, *entries) for parent in PurePosixPath(path).parents}
    return [
        entry
        for path, entry in sorted(entries.items())
        if entry.kind != "gone"
        and (path in files if entry.kind == "file" else path not in files)
        and not (entry.kind == "link" and path in folders)
    ]


def image_changes(task: Task, oracle: Oracle, trajectory: Trajectory) -> ApplyChanges:
    """The allowed changes of an image outside of the tests' set-up, for a fresh sandbox of it. The trajectory's own
    claim is not trusted.

    The walk of a sandbox finds no entry below a link, so such a path is forged. It would be written where the link
    points, perhaps outside the allowed paths.
    """
    links = {PurePosixPath(change.path) for change in trajectory.changes if change.kind == "link"}
    setup = SetUp(task, oracle, trajectory.originals)
    changes = tuple(
        change
        for change in trajectory.changes
        if change.kind != "other"
        and not setup.keeps(change.path, trajectory.diff.get(change.path) if change.kind == "file" else None)
        and _allowed(task, change.path)
        and links.isdisjoint(PurePosixPath(change.path).parents)
        and (change.kind != "file" or change.path in trajectory.diff)
    )
    files = {change.path: trajectory.diff[change.path] for change in changes if change.kind == "file"}
    return ApplyChanges(changes=changes, files=files)


def from_root(task: Task, changes: ApplyChanges) -> ApplyChanges:
    """The same changes for a sandbox whose workspace is the image's root. task: it names its repository."""

    def place(path: str) -> str:
        return path if path.startswith("/") else f"{task.repository.rstrip('/')}/{path}"

    moved = tuple(msgspec.structs.replace(change, path=place(change.path)) for change in changes.changes)
    return ApplyChanges(changes=moved, files={place(path): content for path, content in changes.files.items()})
