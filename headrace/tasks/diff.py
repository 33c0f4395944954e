"""Computes the diff of an episode: pulls the workspace and compares it with what it was before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.sandbox import PullChanges, PullTree, Sandbox, Snapshot
from headrace.messages.tasks import Change, Task
from headrace.vmhost.guest import globs
from headrace.vmhost.guest.globs import matches
from headrace.vmhost.guest.names import key

PULL_LIMIT = 32 << 20
"""Largest number of bytes that are pulled from a workspace: more than a light machine's workspace can hold."""
PULL_WHOLE = 512 << 10
"""A repository of at most this many bytes is pulled completely; from a larger one only allowed and suspect paths."""
SUSPECT = ("**/test_*.py", "**/*_test.py", "**/conftest.py", "**/*.pth", "**/sitecustomize.py", "**/usercustomize.py")
"""Paths whose changes are reported although the judge replaces or ignores these files."""
_TEST_CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
"""Folders that test runs create: files in them are not reported as changes."""


class TreeTooLarge(HeadraceError):
    """The task's own workspace is too large to be pulled, so no attempt's changes can be known: an infrastructure
    failure, not a reward of 0."""


class Diff(NamedTuple):
    """Changes by kind. The judge's sandbox gets `changed` and `deleted` only."""

    changed: dict[str, bytes]
    """Allowed paths with new or different content."""
    deleted: tuple[str, ...]
    """Allowed paths that were deleted."""
    touched: tuple[str, ...]
    """Paths outside the allowed ones that were changed, created or deleted."""


def image_diff(
    changes: Sequence[Change], files: Mapping[str, bytes], allowed: Sequence[str]
) -> tuple[Diff, tuple[Change, ...]]:
    """The changes of an image as a diff, and the changes of allowed paths with modes and links. files: path to content
    of the changed files. allowed: globs of the paths whose changes are extracted."""
    extracted = [change for change in changes if change.kind != "other" and globs.allowed(allowed, change.path)]
    paths = {change.path for change in extracted}
    changed = {change.path: files[change.path] for change in extracted if change.kind == "file"}
    deleted = tuple(change.path for change in extracted if change.kind == "gone")
    touched = tuple(dict.fromkeys(change.path for change in changes if change.path not in paths))
    return Diff(changed, deleted, touched), tuple(extracted)


class WorkspaceTree(NamedTuple):
    """A workspace without an image."""

    files: Mapping[str, bytes]
    entries: Sequence[Change] = ()
    """As `Task.entries`."""

    def only(self, patterns: Sequence[str]) -> "WorkspaceTree":
        """The paths that match any of these globs."""

        def matched(path: str) -> bool:
            return any(matches(pattern, path, anchored=True) for pattern in patterns)

        files = {path: data for path, data in self.files.items() if matched(path)}
        return WorkspaceTree(files, [entry for entry in self.entries if matched(entry.path)])


def diff(before: WorkspaceTree, after: WorkspaceTree, allowed: Sequence[str]) -> tuple[Diff, tuple[Change, ...]]:
    """Compare two trees: the changes as a diff, and those of allowed paths that contents do not say, such as links and
    modes. allowed: globs of the paths whose changes are extracted."""
    special = {change.path: change for change in _special(before, after)}
    changed: dict[str, bytes] = {}
    deleted: list[str] = []
    touched: list[str] = []
    changes: list[Change] = []
    for path in sorted(before.files.keys() | after.files.keys() | special.keys()):
        content, change = after.files.get(path), special.get(path)
        same = before.files.get(path) == content and change is None
        if same or not _TEST_CACHES.isdisjoint(path.split("/")) or path.endswith(".pyc"):
            continue
        if not any(matches(pattern, path, anchored=True) for pattern in allowed):
            touched.append(path)
            continue
        if content is not None:
            changed[path] = content
        elif path in before.files or (change is not None and change.kind == "gone"):
            deleted.append(path)
        if change is not None and change.kind == "other":
            touched.append(path)
        elif change is not None:
            changes.append(change)
    return Diff(changed, tuple(deleted), tuple(touched)), tuple(changes)


def _special(before: WorkspaceTree, after: WorkspaceTree) -> Iterator[Change]:
    """The changes of links, empty folders and modes, except those that the change of a file's content implies."""
    old, new = ({entry.path: entry for entry in tree.entries} for tree in (before, after))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path) or ".git" in path.split("/"):
            continue
        if path in new:
            yield new[path]
        elif path in after.files:
            yield Change(path, "file", 0o644)
        elif old[path].kind == "link" or (
            old[path].kind == "folder" and not any(other.startswith(f"{path}/") for other in (*after.files, *new))
        ):
            yield Change(path, "gone")


class Pulled(NamedTuple):
    """The changes of a sandbox since its attempt began."""

    changes: Snapshot
    """Empty when there are too many."""
    over: bool
    """Whether the changes cannot be read because of what the candidate left: more than `PULL_LIMIT` bytes, more entries
    than a walk reads, no workspace, or no sandbox any more."""
    digest: str
    """Of the workspace; empty in an image."""


ORIGINALS = PullChanges().originals
"""Bytes of the largest original that a rollout reads in an image."""


async def pull(sandbox: Sandbox, task: Task, call_id: str, originals: int = ORIGINALS) -> Pulled:
    """The changes so far. call_id: its beginning. originals: bytes of the largest original that is read in an image.
    TreeTooLarge, SandboxLost."""
    if task.image:
        tree = await sandbox.call(PullChanges(limit=PULL_LIMIT, originals=originals), f"{call_id}-changes")
        over = tree.truncated or not tree.ok  # only changes to the image are pulled: the candidate wrote all of them
        changes, entered = image_diff(tree.changes, tree.files, task.allowed)
    else:
        patterns, before = _patterns(task), WorkspaceTree(task.files, task.entries or ())
        tree = await sandbox.call(PullTree(patterns=patterns, limit=PULL_LIMIT), f"{call_id}-tree")
        unknown = tree.truncated or not tree.ok
        over = unknown and (tree.ended or _fits_at_first(task))
        if unknown and not over:
            raise TreeTooLarge(tree.error or f"the workspace holds more than {PULL_LIMIT >> 20} MiB in {patterns}")
        entries = [msgspec.structs.replace(entry, path=key(entry.path)) for entry in tree.changes]
        after = WorkspaceTree({key(path): data for path, data in tree.files.items()}, entries)
        changes, entered = diff(before.only(patterns), after, task.allowed)
    snapshot = Snapshot(
        diff=changes.changed,
        deleted=changes.deleted,
        changes=entered,
        originals={path: data for path, data in tree.originals.items() if path in changes.changed},
        touched=changes.touched,
    )
    return Pulled(Snapshot(diff={}) if over else snapshot, over, tree.digest)


def _patterns(task: Task) -> tuple[str, ...]:
    """Globs of the paths that are pulled from the workspace of a task without an image."""
    if sum(map(len, task.files.values())) <= PULL_WHOLE:
        return ("**",)
    return (*task.allowed, *SUSPECT)


def _fits_at_first(task: Task) -> bool:
    """Whether the task's own files are within the limit. If so, the candidate filled the workspace, and that counts as
    the candidate's outcome: with infrastructure failures a policy could remove its own failures from the baseline."""
    return sum(map(len, task.files.values())) <= PULL_LIMIT
