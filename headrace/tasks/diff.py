"""Computes the diff of an episode: pulls the workspace and compares it with what it was before."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.messages.sandbox import Change, PullChanges, PullTree, Sandbox, Snapshot
from headrace.messages.tasks import Task
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


class TreeTooLarge(Exception):
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


def diff(before: Mapping[str, bytes], after: Mapping[str, bytes], allowed: Sequence[str]) -> Diff:
    """Compare two trees. allowed: globs of the paths whose changes are extracted."""
    changed: dict[str, bytes] = {}
    deleted: list[str] = []
    touched: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        content = after.get(path)
        if before.get(path) == content or not _TEST_CACHES.isdisjoint(path.split("/")) or path.endswith(".pyc"):
            continue
        if not any(matches(pattern, path, anchored=True) for pattern in allowed):
            touched.append(path)
        elif content is None:
            deleted.append(path)
        else:
            changed[path] = content
    return Diff(changed, tuple(deleted), tuple(touched))


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
        changes, of_image = image_diff(tree.changes, tree.files, task.allowed)
    else:
        patterns = _patterns(task)
        tree = await sandbox.call(PullTree(patterns=patterns, limit=PULL_LIMIT), f"{call_id}-tree")
        unknown = tree.truncated or not tree.ok
        over = unknown and (tree.ended or _fits_at_first(task))
        if unknown and not over:
            raise TreeTooLarge(tree.error or f"the workspace holds more than {PULL_LIMIT >> 20} MiB in {patterns}")
        before = {path: data for path, data in task.files.items() if any(matches(p, path, True) for p in patterns)}
        changes, of_image = diff(before, {key(path): data for path, data in tree.files.items()}, task.allowed), ()
    snapshot = Snapshot(
        diff=changes.changed,
        deleted=changes.deleted,
        changes=of_image,
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
