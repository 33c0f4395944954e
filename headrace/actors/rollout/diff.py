"""Computes the diff of an episode: the changes between the workspace before and after it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.messages.sandbox import Change
from headrace.vmhost.guest import globs
from headrace.vmhost.guest.globs import matches

_TEST_CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
"""Folders that test runs create: files in them are not reported as changes."""


class TreeTooLarge(Exception):
    """The workspace cannot be pulled completely, so the episode's changes are unknown: an infrastructure failure, not a
    reward of 0."""


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
