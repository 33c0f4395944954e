"""A root file system as an index: paths to inodes, and their contents in one spool file.

Layers of a container image are applied to this index and never to the host's own disk, so nothing in an archive can
reach outside: a link that points at ``/etc`` or ``../..`` is a few bytes that only the guest will ever follow, owners
and modes need no privileges, and names that no file system here would take are kept as they are. The price is one copy
of the contents on disk.

Whiteouts as in the OCI image specification, "Image Layer Filesystem Changeset": ``.wh.NAME`` hides NAME of lower
layers, ``.wh..wh..opq`` everything of lower layers in its folder; neither touches entries of its own layer, whatever
their order.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import cpio

_HIDE, _OPAQUE = ".wh.", ".wh..wh..opq"
PAGE = 4096
_HOPS = 40
"""Symbolic links that one path may pass, as in Linux."""


class BadImage(VmhostError):
    """An archive that can't be used; the text says what is wrong with it."""


class Inode(msgspec.Struct, eq=False):
    """The file behind a path; hard links share one."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    target: str = ""
    offset: int = 0
    size: int = 0


class Tree:
    """The index. `spool` takes contents as they come, `most` bytes of them; an entry counts as a page."""

    def __init__(self, spool: BinaryIO, most: int = 1 << 62) -> None:
        self._spool = spool
        self._most = most
        self._taken = 0
        self._nodes: dict[str, tuple[Inode, int]] = {}
        self._children: dict[str, set[str]] = {"": set()}
        self._top = Inode(stat.S_IFDIR | 0o755)
        self.skipped = 0
        """Device nodes that were left out: the guest has its own."""

    # -- reading --------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Inode | None:
        """The inode of a path as it stands, the last link not followed."""
        return self._top if path == "" else self._nodes[path][0] if path in self._nodes else None

    def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """Content of a regular file, links followed inside the tree; None when there is none."""
        try:
            inode = self.get(self.resolve(path))
        except BadImage:
            return None
        if inode is None or not stat.S_ISREG(inode.mode):
            return None
        return self._content(inode, limit)

    def resolve(self, path: str) -> str:
        """A path with every link on it followed, inside the tree: ``..`` ends at its top. BadImage for a loop."""
        return self._walk(path, last=True)

    def size(self) -> int:
        """Its size in a RAM disk: contents in whole pages, one page per entry."""
        seen = {id(inode): inode for inode, _ in self._nodes.values()}
        return sum(PAGE + -(-inode.size // PAGE) * PAGE for inode in seen.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def entries(self, prefix: str) -> Iterator[cpio.Entry]:
        """Everything as archive members under a folder, in order, folders before what they hold."""
        yield _entry(prefix, self._top, b"")
        names: dict[int, int] = {}
        for inode, _ in self._nodes.values():
            names[id(inode)] = names.get(id(inode), 0) + 1
        written: dict[int, int] = {}
        for path in sorted(self._nodes, key=lambda path: path.split("/")):
            inode, _ = self._nodes[path]
            links = names[id(inode)] if stat.S_ISREG(inode.mode) else 1
            again = id(inode) in written
            number = written.setdefault(id(inode), 1_000_000 + len(written))
            data = b"" if again else self._content(inode, inode.size)
            if stat.S_ISLNK(inode.mode):
                data = os.fsencode(inode.target)
            entry = _entry(f"{prefix}/{path}", inode, data)
            yield msgspec.structs.replace(entry, links=links, inode=number) if links > 1 else entry

    def _content(self, inode: Inode, limit: int) -> bytes:
        if not stat.S_ISREG(inode.mode):
            return b""
        self._spool.seek(inode.offset)
        return self._spool.read(min(inode.size, limit))

    def _walk(self, path: str, last: bool, make: int = -1) -> str:
        """Follow links; with `make`, missing folders come into being in that layer."""
        done: list[str] = []
        parts = path.split("/")[::-1]
        hops = 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                continue
            here = "/".join([*done, part])
            inode = self.get(here)
            if inode is not None and stat.S_ISLNK(inode.mode) and (parts or last):
                hops += 1
                if hops > _HOPS:
                    raise BadImage(f"a loop of links at {path!r}")
                if inode.target.startswith("/"):
                    done = []
                parts += inode.target.split("/")[::-1]
                continue
            if parts and inode is not None and not stat.S_ISDIR(inode.mode):
                raise BadImage(f"{here!r} is no folder, yet something lies in it")
            if make >= 0 and parts and inode is None:
                self._put(here, Inode(stat.S_IFDIR | 0o755), make)
            done.append(part)
        return "/".join(done)

    # -- writing --------------------------------------------------------------------------------------------------

    def add_tar(self, archive: tarfile.TarFile, layer: int) -> None:
        """Apply one layer. BadImage for what no layer may hold."""
        for member in archive:
            name = member.name.strip("/")
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if ".." in parts or "\0" in name:
                raise BadImage(f"the archive holds {member.name!r}, which leaves its root")
            if not parts:
                if member.isdir():
                    self._top = _inode(member, stat.S_IFDIR)
                continue
            *folder, last = parts
            if last.startswith(_HIDE):
                self._whiteout("/".join(folder), last, layer)
                continue
            parent = self._walk("/".join([*folder, "."]), last=True, make=layer)
            self._member(archive, member, f"{parent}/{last}" if parent else last, layer)

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, layer: int) -> None:
        if member.islnk():
            target = self._walk(member.linkname.strip("/"), last=False)
            found = self.get(target)
            if found is None or stat.S_ISDIR(found.mode):
                raise BadImage(f"{path!r} is a hard link to {member.linkname!r}, which is not there")
            self._put(path, found, layer)
        elif member.isreg():
            inode = _inode(member, stat.S_IFREG)
            source = archive.extractfile(member)
            assert source is not None
            inode.offset, inode.size = self._store(source), member.size
            self._put(path, inode, layer)
        elif member.issym():
            self._put(path, msgspec.structs.replace(_inode(member, stat.S_IFLNK), target=member.linkname), layer)
        elif member.isdir():
            self._put(path, _inode(member, stat.S_IFDIR), layer)
        elif member.isfifo():
            self._put(path, _inode(member, stat.S_IFIFO), layer)
        else:
            self.skipped += 1

    def add_folder(self, root: Path) -> None:
        """Take a folder of this host as it lies there; its links are not followed. OSError."""
        seen: dict[tuple[int, int], Inode] = {}
        self._top = _status(os.lstat(root), stat.S_IFDIR)
        for folder, folders, files in os.walk(root):
            inner = os.path.relpath(folder, root)
            for name in sorted([*folders, *files]):
                full = f"{folder}/{name}"
                path = name if inner == "." else f"{inner}/{name}"
                status = os.lstat(full)
                kind = stat.S_IFMT(status.st_mode)
                if kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
                    self.skipped += 1
                    continue
                known = seen.get((status.st_dev, status.st_ino))
                if known is not None:
                    self._put(path, known, 0)
                    continue
                inode = _status(status, kind)
                if kind == stat.S_IFLNK:
                    inode.target = os.readlink(full)
                elif kind == stat.S_IFREG:
                    fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW)
                    with os.fdopen(fd, "rb") as source:
                        inode.offset = self._store(source)
                    inode.size = self._spool.tell() - inode.offset
                    if status.st_nlink > 1:
                        seen[status.st_dev, status.st_ino] = inode
                self._put(path, inode, 0)

    def _store(self, source: IO[bytes]) -> int:
        offset = self._spool.seek(0, os.SEEK_END)
        while piece := source.read(1 << 20):
            self._take(len(piece))
            self._spool.write(piece)
        return offset

    def _take(self, count: int) -> None:
        self._taken += count
        if self._taken > self._most:
            raise BadImage(f"it unpacks to more than {self._most >> 20} MiB, which is what a root in memory may have")

    def _put(self, path: str, inode: Inode, layer: int) -> None:
        self._take(PAGE)
        before = self.get(path)
        if before is not None and not (stat.S_ISDIR(before.mode) and stat.S_ISDIR(inode.mode)):
            self._drop(path, layer + 1)
        self._nodes[path] = inode, layer
        parent, _, name = path.rpartition("/")
        self._children.setdefault(parent, set()).add(name)

    def _whiteout(self, folder: str, mark: str, layer: int) -> None:
        try:
            parent = self.resolve(folder)
        except BadImage:
            return
        if mark == _OPAQUE:
            for name in list(self._children.get(parent, ())):
                self._drop(f"{parent}/{name}" if parent else name, layer)
        elif name := mark.removeprefix(_HIDE):
            self._drop(f"{parent}/{name}" if parent else name, layer)

    def _drop(self, path: str, below: int) -> None:
        """Remove what layers under `below` brought to a path; a folder stays while something newer is in it."""
        for name in list(self._children.get(path, ())):
            self._drop(f"{path}/{name}", below)
        known = self._nodes.get(path)
        if known is None or known[1] >= below or self._children.get(path):
            return
        del self._nodes[path]
        self._children.pop(path, None)
        parent, _, name = path.rpartition("/")
        self._children[parent].discard(name)


def _inode(member: tarfile.TarInfo, kind: int) -> Inode:
    if min(member.uid, member.gid) < 0 or max(member.uid, member.gid) >= 1 << 32:
        raise BadImage(f"{member.name!r} has an owner that does not exist: {member.uid}:{member.gid}")
    mtime = min(max(int(member.mtime), 0), (1 << 32) - 1)
    return Inode(kind | member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime=mtime)


def _status(status: os.stat_result, kind: int) -> Inode:
    mtime = min(max(int(status.st_mtime), 0), (1 << 32) - 1)
    return Inode(kind | stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid, mtime=mtime)


def _entry(name: str, inode: Inode, data: bytes) -> cpio.Entry:
    return cpio.Entry(name, inode.mode, data, uid=inode.uid, gid=inode.gid, mtime=inode.mtime)
