"""Walks over trees that a candidate left behind, within a budget: any number, depth and size of entries.

A walk holds the names of the folders on its way and nothing else, so a tree of any size costs a bounded amount of
memory. An operation that exceeds its budget is refused in a sentence; the host waits longer than `SECONDS` for it.
"""

import ctypes
import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial

SECONDS = 15.0
"""Longest time of a walk, reading included."""
READ, NAMES, HELD, KEPT = 256 << 20, 1 << 20, 2 << 20, 256 << 10
"""Bytes that one walk may read; of the paths that it may return; of names that it may hold; of contents that it keeps
instead of reading them again."""
_NAME_OVERHEAD = 64
_GET_FLAGS, _SET_FLAGS, _FIXED, _DETACH = 0x80086601, 0x40086602, 0x30, 2


class OperationError(Exception):
    """The operation is not possible; the text is one line that a policy can use."""


class Budget:
    """The limits of one operation. Each method raises OperationError beyond it."""

    def __init__(self, seconds: float = SECONDS, names: int = NAMES) -> None:
        self._seconds, self._most_names = seconds, names
        self._deadline = time.monotonic() + seconds
        self._read, self._names, self._held, self._kept = READ, names, HELD, KEPT

    def time(self) -> None:
        """Check the time."""
        if time.monotonic() > self._deadline:
            raise OperationError(f"the tree is too large to be read within {self._seconds:g} s")

    def read(self, size: int) -> None:
        """Bytes were read, holes included."""
        self._read -= size
        if self._read < 0:
            raise OperationError(f"the tree is larger than {READ >> 20} MiB")
        self.time()

    def name(self, path: str) -> None:
        """A path will be returned."""
        self.time()
        self._names -= len(path) + _NAME_OVERHEAD
        if self._names < 0:
            raise OperationError(f"the tree has more than {self._most_names >> 20} MiB of paths")

    def hold(self, size: int) -> None:
        """Bytes of names are held; negative: no longer."""
        self._held -= size
        if self._held < 0:
            raise OperationError(f"the folders of the tree have more than {HELD >> 20} MiB of names")

    def keep(self, size: int) -> bytearray | None:
        """A place for content that is kept; None when it must be read again."""
        if size > self._kept:
            return None
        self._kept -= size
        return bytearray()


def paths(root: str, budget: Budget, without: Collection[str] = ()) -> Iterator[str]:
    """Relative paths of every entry that is no folder, and of every empty folder with a slash behind it, in the order
    of the paths as text. without: names of folders that are left out. A folder that cannot be read counts as empty.
    OperationError when the root is no folder, or beyond the budget."""
    try:
        if not stat.S_ISDIR(os.lstat(root).st_mode):
            raise OperationError("the workspace is no folder any more")
        os.scandir(root).close()
    except OSError as error:
        raise OperationError(f"the workspace cannot be read: {error.strerror}") from None
    folder, level = "", _listing(root, "", budget, without)
    above: list[tuple[int, list[str], int]] = []
    cost = sum(map(_cost, level))
    while True:
        if not level:
            budget.hold(-cost)
            if not above:
                return
            length, level, cost = above.pop()
            folder = folder[:length]
            continue
        name = level.pop()
        budget.time()
        if name.endswith("/"):
            above.append((len(folder), level, cost))
            folder += name
            level = _listing(root, folder, budget, without)
            cost = sum(map(_cost, level))
            if not level:
                yield folder
        else:
            yield folder + name


def _cost(name: str) -> int:
    return len(name) + _NAME_OVERHEAD


def _listing(root: str, folder: str, budget: Budget, without: Collection[str]) -> list[str]:
    """Names in a folder, the last first; those of folders end with a slash, by which whole paths are ordered."""
    names: list[str] = []
    try:
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                budget.time()
                if not entry.is_dir(follow_symlinks=False):
                    name = entry.name
                elif entry.name in without:
                    continue
                else:
                    name = entry.name + "/"
                budget.hold(_cost(name))
                names.append(name)
    except OSError:
        pass
    names.sort(reverse=True)
    return names


def remove(root: str) -> None:
    """Remove a folder with everything in it, of any depth, flags and modes, but nothing of what is mounted there. The
    folder itself goes last: its absence says that nothing is left, and an interrupted removal can be
    repeated."""
    if not _unmounted(root):
        return
    if os.path.islink(root) or not os.path.isdir(root):
        with suppress(OSError):
            os.unlink(root)
        return
    pending = [root]
    while pending:
        folder = pending.pop()
        # By descriptor: a program that still runs may put a link in the folder's place.
        fd = _insist(partial(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC), folder)
        if fd is None:
            continue
        try:
            if folder == root:
                _free(fd)  # the folders below move into it
            with os.scandir(fd) as entries:
                inner = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_folder in inner:
                if not is_folder:
                    _insist(partial(os.unlink, name, dir_fd=fd), name, fd)
                    continue
                moved = f"{root}/{os.urandom(8).hex()}"  # so that no path grows too long
                if _insist(partial(os.rename, name, moved, src_dir_fd=fd), name, fd) is not None:
                    pending.append(moved)
        finally:
            os.close(fd)
        if folder != root:
            _insist(partial(os.rmdir, folder), folder)
    _insist(partial(os.rmdir, root), root)


def _insist(change: Callable[[], int | None], name: str, folder: int | None = None) -> int | None:
    """Make a change to an entry of a folder, again without the flags and modes that forbid it. None when it is not
    possible, otherwise its result or 0."""
    for again in (True, False):
        try:
            return change() or 0
        except OSError:
            if again:
                _open_up(name, folder)
    return None


def _open_up(name: str, folder: int | None) -> None:
    """Clear the flags of an entry and of its folder, such as immutable, and let the owner change both."""
    if folder is not None:
        _free(folder)
    with suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            _free(fd)
        finally:
            os.close(fd)
        return
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=folder)


def _free(fd: int) -> None:
    with suppress(OSError):
        flags = bytearray(fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
        flags[0] &= ~_FIXED
        fcntl.ioctl(fd, _SET_FLAGS, bytes(flags))
    with suppress(OSError):
        os.fchmod(fd, 0o700)


def _unmounted(root: str) -> bool:
    """Unmount everything at or below a path. False when something is left."""
    for last in (False, True):
        with open("/proc/self/mountinfo", "rb") as file:
            places = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in file]
        inside = [place for place in places if place == os.fsencode(root) or place.startswith(os.fsencode(root) + b"/")]
        if last or not inside:
            return not inside
        for place in reversed(inside):
            ctypes.CDLL(None).umount2(place, _DETACH)
    return False
