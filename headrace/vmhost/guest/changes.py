"""The changes of an image: read from the writable layer of its overlay, and made again in another clone.

The writable layer holds every changed or new entry, and a whiteout (a character device 0:0) for every one that is gone;
a folder that was removed and made again is opaque. An entry that equals the one below it is no change:
writing the same content or only touching a file copies it up as well. Nothing is executed and git is not asked, so a
commit, or a repository without its `.git`, hides nothing.

Source: Linux Documentation/filesystems/overlayfs.rst.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .files import Answer, Workspace
from .frames import Body, FileBody
from .names import shown
from .walks import Budget, OperationError

MOST = 100_000
"""Largest number of entries that a walk reads."""
UNCHANGED = (
    *("/dev", "/proc", "/sys", "/tmp", "/run", "/etc/hosts", "/etc/hostname"),
    *(".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"),
)
"""Paths that no diff of an image holds: files that the slot itself makes, temporary files, caches, and history."""
_OPAQUE = "trusted.overlay.opaque"
NAMES, ORIGINALS = 8 << 20, 16 << 20
"""Bytes of all paths that a walk reads, and of all originals that it returns."""


def walk(upper: str, lower: Sequence[str], skip: Sequence[str], limit: int, originals: int) -> Answer:
    """Changes below `upper`, as [path, kind, mode, target] in the order in which they are made again: ``gone`` for a
    removed entry, otherwise ``file``, ``folder``, ``link`` or ``other``. Paths are as `shown` gives them. lower: the
    layers below, the top first; skip: names of folders that are left out, and absolute paths of entries; limit: bytes
    of all contents.

    The bodies are the files' contents; then those that they replace, where these have at most `originals` bytes.
    Truncated and empty beyond `limit` or `MOST`; OperationError beyond the budget of a walk.
    """
    names = {entry for entry in skip if not entry.startswith("/")}
    paths = {entry for entry in skip if entry.startswith("/")}
    changed: list[tuple[str, str, int, str]] = []
    bodies: list[Body] = []
    before: list[Body] = []
    had: list[str] = []
    budget = Budget(names=NAMES)
    left, entries, left_before = limit, 0, ORIGINALS
    pending: list[tuple[str, bool]] = [("", False)]
    while pending:
        folder, fresh = pending.pop()
        inner: list[tuple[str, bool]] = []
        for name in _names(upper + folder):
            path = f"{folder}/{name}"
            budget.name(path)
            try:
                status = os.lstat(upper + path)
            except FileNotFoundError:  # a program that still runs removed it
                continue
            below = None if fresh else _below(lower, path)
            old = os.lstat(below) if below else None
            entries += 1
            if path in paths:
                continue
            if entries > MOST:
                return {"entries": [], "truncated": True}, []
            if stat.S_ISDIR(status.st_mode):
                if name in names:
                    continue
                opaque = fresh or _opaque(upper + path) or old is None or not stat.S_ISDIR(old.st_mode)
                if opaque and old is not None:
                    changed.append((path, "gone", 0, ""))
                if opaque or (old is not None and old.st_mode != status.st_mode):
                    changed.append((path, "folder", status.st_mode & 0o7777, ""))
                inner.append((path, opaque))
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                if old is not None and name not in names:
                    changed.append((path, "gone", 0, ""))
            elif stat.S_ISLNK(status.st_mode):
                target = _target(upper + path)
                if below is None or old is None or not stat.S_ISLNK(old.st_mode) or os.readlink(below) != target:
                    changed.append((path, "link", 0o777, target))
            elif stat.S_ISREG(status.st_mode) and (content := FileBody(upper + path)).readable:
                if len(content) > left:
                    return {"entries": [], "truncated": True}, []
                if below is not None and old is not None and stat.S_ISREG(old.st_mode):
                    if old.st_mode == status.st_mode and _equal(content, FileBody(below), budget):
                        continue
                    if old.st_size <= min(originals, left_before):
                        left_before -= old.st_size
                        had.append(path)
                        before.append(FileBody(below))
                left -= len(content)
                changed.append((path, "file", status.st_mode & 0o7777, ""))
                bodies.append(content)
            else:
                changed.append((path, "other", status.st_mode & 0o7777, ""))
        pending += reversed(inner)
    named = [(shown(path), kind, mode, target) for path, kind, mode, target in changed]
    return {"entries": named, "originals": list(map(shown, had)), "truncated": False}, bodies + before


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):  # a program that still runs removed it
        return []
    except OSError as error:
        raise OperationError(f"the changes cannot be read: {error.strerror}") from None


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _equal(one: FileBody, other: FileBody, budget: Budget) -> bool:
    """Whether two files have the same content now."""
    if len(one) != len(other):
        return False
    for left, right in zip(one.pieces(), other.pieces(), strict=False):
        budget.read(len(left))
        if left != right:
            return False
    return True


def _below(lower: Sequence[str], path: str) -> str | None:
    """The entry of a path in the layers below, as the overlay would show it."""
    for layer in lower:
        try:
            status = os.lstat(layer + path)
        except OSError:
            continue
        return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else layer + path
    return None


def _opaque(path: str) -> bool:
    try:
        return os.getxattr(path, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def apply(space: Workspace, header: dict[str, Any], bodies: Sequence[bytes], everywhere: bool = False) -> Answer:
    """Make changes again: removals first, then folders, files and links. Relative paths lie in the workspace.
    everywhere: absolute ones are allowed too. OperationError, naming the path that cannot be changed."""
    contents = iter(bodies)
    modes: list[tuple[str, int]] = []
    for path, kind, mode, target in header["entries"]:
        full = path if path.startswith("/") else f"{space.root}/{path}"
        if ".." in full.split("/") or "\0" in full or not (everywhere or full != path):
            raise OperationError(f"{shown(path)}: expected a path without .. in the workspace")
        try:
            if kind == "gone":
                space.remove(full, path)
                continue
            if kind == "folder":
                if os.path.islink(full) or not os.path.isdir(full):
                    _unlink(full)
                    os.makedirs(full)
                modes.append((full, mode))
                continue
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if os.path.isdir(full) and not os.path.islink(full):
                space.remove(full, path)
            _unlink(full)
            if kind == "link":
                os.symlink(target, full)
                continue
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as out:
                out.write(next(contents))
                os.fchmod(fd, mode)
        except OSError as error:
            raise OperationError(f"{shown(path)}: {error.strerror}") from None
    for full, mode in reversed(modes):  # last, because a folder's mode may forbid writing into it
        with suppress(OSError):
            os.chmod(full, mode)
    return {}, []


def _unlink(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)
