"""What an episode changed: the tree before against the tree after."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.vmhost.guest.globs import matches

_LITTER = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
"""Folders that running tests leaves behind: neither a change nor a suspicion."""


class Diff(NamedTuple):
    """Changes by kind. Only `changed` and `deleted` reach the judge's sandbox."""

    changed: dict[str, bytes]
    """Allowed paths: new or other content."""
    deleted: tuple[str, ...]
    """Allowed paths that are gone."""
    touched: tuple[str, ...]
    """Paths outside the allowed ones that were changed, made or removed."""


def diff(before: Mapping[str, bytes], after: Mapping[str, bytes], allowed: Sequence[str]) -> Diff:
    """Compare two trees under the globs of the allowed paths."""
    changed: dict[str, bytes] = {}
    deleted: list[str] = []
    touched: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        content = after.get(path)
        if before.get(path) == content or not _LITTER.isdisjoint(path.split("/")) or path.endswith(".pyc"):
            continue
        if not any(matches(pattern, path, anchored=True) for pattern in allowed):
            touched.append(path)
        elif content is None:
            deleted.append(path)
        else:
            changed[path] = content
    return Diff(changed, tuple(deleted), tuple(touched))
