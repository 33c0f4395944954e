"""File operations of a slot, run by its agent under the tools' effective user, without a process of their own.

Only regular files are opened, and never in a way that could block: a tool may leave fifos, devices and loops behind.
Paths are relative to the workspace, or absolute inside it.
"""

import os
import re
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import FrameType
from typing import Any

from . import lines as of_files
from . import walks
from .frames import Body, FileBody
from .globs import matches
from .names import shown
from .walks import Budget, OperationError

Answer = tuple[dict[str, Any], Sequence[Body]]
SEARCH_S = 10.0
"""Time limit of a search in seconds: a pattern can take exponential time."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ /:=,<>!@#%&;\"'~`-")


def new_digest() -> blake2b:
    """The digest of a tree: call `add_entry` for every entry that is no folder, in sorted order."""
    return blake2b(digest_size=16)


def add_entry(digest: blake2b, path: str, mode: int, data: bytes) -> None:
    """Add path, mode and content of a file, or the target of a link."""
    digest.update(_head(path, mode, len(data)))
    digest.update(data)


def _head(path: str, mode: int, size: int) -> bytes:
    return b"%s\0%o\0%d\0" % (os.fsencode(path), mode, size)


class Workspace:
    """The tree under `root`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def resolve(self, path: str) -> str:
        """The absolute path of a workspace path. OperationError when it leaves the workspace."""
        if path == self.root or path.startswith(self.root + "/"):
            path = path[len(self.root) + 1 :]
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise OperationError(f"{shown(path)}: paths are relative to the workspace and may not leave it")
        return "/".join([self.root, *parts])

    def paths(self, budget: Budget) -> Iterator[tuple[str, os.stat_result]]:
        """Relative path and status of every entry that is no folder, sorted, without .git. OperationError beyond the
        budget."""
        for path in walks.paths(self.root, budget, (".git",)):
            if not path.endswith("/"):
                with suppress(OSError):
                    yield path, os.lstat(f"{self.root}/{path}")

    def _bytes(self, path: str, limit: int) -> bytes:
        """At most `limit` bytes of an entry of `paths` that was a regular file; none if it is not one any more."""
        try:
            fd = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                data = os.read(fd, min(limit, 1 << 20))
                while len(data) >= 1 << 20 and len(data) < limit and (more := os.read(fd, 1 << 20)):
                    data += more
            finally:
                os.close(fd)
        except OSError:
            return b""
        return data[:limit]

    def content(self, path: str, limit: int) -> tuple[bytes, bool]:
        """At most `limit` bytes of a regular file, and whether there was more."""
        try:
            fd = os.open(self.resolve(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise OperationError(f"{shown(path)}: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OperationError(f"{shown(path)}: not a regular file")
            data = b""
            while len(data) <= limit and (piece := os.read(fd, min(limit + 1 - len(data), 1 << 20))):
                data += piece
        except OSError as error:
            raise OperationError(f"{shown(path)}: {error.strerror}") from None
        finally:
            os.close(fd)
        return data[:limit], len(data) > limit

    def read(self, path: str, limit: int) -> Answer:
        """ReadFile."""
        data, more = self.content(path, limit)
        return {"truncated": more, "data": 0}, [data]

    def write(self, paths: list[str], contents: list[bytes], delete: list[str]) -> Answer:
        """WriteFiles. Missing folders are created; a deleted path may be a whole folder."""
        for path in delete:
            self.remove(self.resolve(path), path)
        for path, content in zip(paths, contents, strict=True):
            target = self.resolve(path)
            try:
                try:
                    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
                except FileNotFoundError:
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
                try:
                    view = memoryview(content)
                    while view:
                        view = view[os.write(fd, view) :]
                finally:
                    os.close(fd)
            except OSError as error:
                raise OperationError(f"{shown(path)}: {error.strerror}") from None
        return {}, []

    def remove(self, target: str, path: str) -> None:
        """Remove an entry and its content. target: its absolute path; path: the one for messages. OperationError."""
        try:
            if not os.path.isdir(target) or os.path.islink(target):
                os.unlink(target)
                return
            if target != self.root:
                with suppress(OSError):  # it is not empty
                    os.rmdir(target)
                    return
            for folder, folders, files in os.walk(target, topdown=False):
                for name in files:
                    os.unlink(f"{folder}/{name}")
                for name in folders:
                    inner = f"{folder}/{name}"
                    (os.unlink if os.path.islink(inner) else os.rmdir)(inner)
            if target != self.root:
                os.rmdir(target)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise OperationError(f"{shown(path)}: {error.strerror}") from None

    def replace(self, path: str, first: int, last: int, text: str) -> Answer:
        """ReplaceLines, 1-based and inclusive; last = first - 1 inserts before first."""
        data, more = self.content(path, 16 << 20)
        if more:
            raise OperationError(f"{shown(path)}: too large to edit by lines")
        try:
            return self.write([path], [of_files.replaced(data, first, last, text)], [])
        except of_files.NoSuchLines as refused:
            raise OperationError(f"{shown(path)} {refused}") from None

    def names(self, pattern: str, limit: int) -> Answer:
        """ListFiles."""
        names: list[str] = []
        for path, _ in self.paths(budget := Budget()):
            if matches(pattern, path):
                if len(names) == limit:
                    return {"truncated": True, "stdout": 0}, ["\n".join(names).encode()]
                budget.name(path)
                names.append(shown(path))
        return {"truncated": False, "stdout": 0}, ["\n".join(names).encode()]

    def search(self, pattern: str, glob: str, context: int, limit: int) -> Answer:
        """Search: ``path NUL line:text`` for hits, ``path NUL line-text`` for context."""
        hit: Callable[[str], object]
        needle = b""
        if _PLAIN.issuperset(pattern):
            hit, needle = (lambda line: pattern in line), pattern.encode()  # of bytes, which most files do not have
        else:
            try:
                hit = re.compile(pattern).search
            except (re.error, RecursionError, OverflowError) as error:
                raise OperationError(f"bad pattern: {error}") from None
        lines: list[str] = []
        hits = 0

        def give_up(_signal: int, _frame: FrameType | None) -> None:
            raise OperationError(f"the search took longer than {SEARCH_S:g} s")

        before = None if needle else signal.signal(signal.SIGALRM, give_up)
        if not needle:
            signal.setitimer(signal.ITIMER_REAL, SEARCH_S)
        try:
            for path, status in self.paths(Budget(SEARCH_S)):
                if not stat.S_ISREG(status.st_mode) or not matches(glob, path):
                    continue
                data = self._bytes(path, 4 << 20)
                if not data.startswith(of_files.UTF16) and (needle not in data or b"\0" in data[:1024]):
                    continue
                text = of_files.bodies(data)
                wanted: dict[int, str] = {}
                for number, line in enumerate(text):
                    if hit(line):
                        hits += 1
                        if hits > limit:
                            break
                        for near in range(max(0, number - context), min(len(text), number + context + 1)):
                            wanted.setdefault(near, "-")
                        wanted[number] = ":"
                for number, mark in sorted(wanted.items()):
                    lines.append(f"{shown(path)}\0{number + 1}{mark}{of_files.shown(text[number])[:1000]}")
                if hits > limit:
                    break
        finally:
            if not needle:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        return {"truncated": hits > limit, "stdout": 0}, ["\n".join(lines).encode("utf-8", "replace")]

    def pull(self, patterns: list[str], limit: int) -> Answer:
        """PullTree: contents of matching regular files, matching links, empty folders and executable files as entries,
        and a digest of the whole tree: paths, modes, contents. OperationError for a tree beyond the budget.

        No content is held: it is hashed in pieces, and read again while it is sent, except small files.
        """
        budget = Budget()
        digest = new_digest()
        paths: list[str] = []
        bodies: list[Body] = []
        entries: list[tuple[str, str, int, str]] = []
        total, truncated = 0, False
        for path in walks.paths(self.root, budget):
            wanted = any(matches(pattern, path.rstrip("/"), anchored=True) for pattern in patterns)
            if path.endswith("/"):
                if wanted:
                    budget.name(path)
                    entries.append((shown(path[:-1]), "folder", 0o755, ""))
                continue
            try:
                status = os.lstat(f"{self.root}/{path}")
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode):
                target = b""
                if stat.S_ISLNK(status.st_mode):
                    with suppress(OSError):
                        target = os.fsencode(os.readlink(f"{self.root}/{path}"))
                    if wanted:
                        budget.name(path)
                        entries.append((shown(path), "link", 0o777, os.fsdecode(target)))
                add_entry(digest, path, status.st_mode, target)
                continue
            content = FileBody(f"{self.root}/{path}", hold=True)
            digest.update(_head(path, status.st_mode, len(content)))
            if wanted and total + len(content) > limit:
                wanted, truncated = False, True
            kept = budget.keep(len(content)) if wanted else None
            for piece in content.pieces():
                budget.read(len(piece))
                digest.update(piece)
                if kept is not None:
                    kept += piece
            if wanted:
                total += len(content)
                budget.name(path)
                paths.append(shown(path))
                bodies.append(content if kept is None else bytes(kept))
                if status.st_mode & 0o100:
                    entries.append((shown(path), "file", 0o755, ""))
        return {"paths": paths, "entries": entries, "digest": digest.hexdigest(), "truncated": truncated}, bodies
