"""A root file system as an index: paths to inodes, and their contents in one spool file.

Layers of a container image are applied to this index and never to the host's own disk, so nothing in an archive can
reach outside: a link that points at ``/etc`` or ``../..`` is a few bytes that only the guest follows, owners and modes
need no privileges, and names that this host's file systems refuse stay unchanged. The price is one copy of the contents
on disk.

Whiteouts as in the OCI image specification, "Image Layer Filesystem Changeset": ``.wh.NAME`` hides NAME of lower
layers, ``.wh..wh..opq`` everything of lower layers in its folder; neither touches entries of its own layer, whatever
their order.
"""

import os
import stat
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import msgspec
import zstandard

from headrace.archives.members import ArchiveLimits
from headrace.archives.tars import Entry
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import erofs

_XATTR = "SCHILY.xattr."
"""Prefix of extended attributes in archives."""
_HIDE, _OPAQUE = ".wh.", ".wh..wh..opq"
PAGE = 4096
_HOPS = 40
"""Symbolic links that one path may pass, as in Linux."""
_PATH, _NAME = 4095, 255
"""Bytes of a path or of a link's target, and of one part of a path, as in Linux."""


class BadImage(VmhostError):
    """An archive that can't be used; the text says what is wrong with it."""


class Inode(msgspec.Struct, eq=False):
    """The file behind a path; hard links share one."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    target: str = ""
    size: int = 0
    file: int = 0
    """Index of the file that holds the contents (`Tree.files`), 0: the spool."""
    places: erofs.Places = ()
    xattrs: dict[str, bytes] = {}


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One path of a saved tree."""

    path: str
    inode: int
    layer: int


class Tree:
    """The index. `spool` takes contents as they come, `most` bytes of them; an entry counts as a page."""

    def __init__(self, spool: BinaryIO, most: int = 1 << 62) -> None:
        self._spool = spool
        self.files: list[BinaryIO] = [spool]
        """Where contents lie: the spool, then blobs."""
        self._most = most
        self._taken = 0
        self._nodes: dict[str, tuple[Inode, int]] = {}
        self._children: dict[str, set[str]] = {"": set()}
        self._top = Inode(stat.S_IFDIR | 0o755)
        self.skipped = 0
        """Device nodes that were left out: the guest has its own."""

    @property
    def limits(self) -> ArchiveLimits:
        """The most that the archive of one layer may hold."""
        return ArchiveLimits(files=self._most // PAGE, size=self._most)

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
        """Bytes of its contents in whole pages, one page per entry."""
        seen = {id(inode): inode for inode, _ in self._nodes.values()}
        return sum(PAGE + -(-inode.size // PAGE) * PAGE for inode in seen.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def paths(self) -> frozenset[str]:
        """All paths as they stand."""
        return frozenset(self._nodes)

    def part(self, first: int, before: frozenset[str]) -> tuple[erofs.Node, dict[int, Inode]]:
        """The entries of the layers from `first` on, as a file system that overlayfs puts over the layers before them;
        and its inodes by the identity of their nodes. before: the paths of those layers; a path that is gone is a
        whiteout (Linux Documentation/filesystems/overlayfs.rst)."""
        inodes: dict[int, Inode] = {}
        made: dict[int, erofs.Node] = {}
        top = self._node(self._top)
        top.children = {}
        folders = {"": top}

        def folder(path: str) -> erofs.Node:
            if path not in folders:
                parent, _, name = path.rpartition("/")
                folders[path] = node = self._node(self._nodes[path][0])
                node.children = {}
                into(parent)[os.fsencode(name)] = node
            return folders[path]

        def into(path: str) -> dict[bytes, erofs.Node]:
            children = folder(path).children
            assert children is not None
            return children

        for path, (inode, layer) in self._nodes.items():
            if layer < first:
                continue
            if stat.S_ISDIR(inode.mode):
                folder(path)
                continue
            parent, _, name = path.rpartition("/")
            node = made.get(id(inode))
            if node is None:
                node = made[id(inode)] = self._node(inode)
                inodes[id(node)] = inode
            else:
                node.links += 1
            into(parent)[os.fsencode(name)] = node
        for path in before - self._nodes.keys():
            parent, _, name = path.rpartition("/")
            above = self.get(parent)
            if above is not None and stat.S_ISDIR(above.mode):
                into(parent)[os.fsencode(name)] = erofs.Node(mode=stat.S_IFCHR)
        return top, inodes

    def _node(self, inode: Inode) -> erofs.Node:
        node = erofs.Node(
            mode=inode.mode, uid=inode.uid, gid=inode.gid, mtime=inode.mtime, size=inode.size, xattrs=inode.xattrs
        )
        if stat.S_ISLNK(inode.mode):
            node.data = os.fsencode(inode.target)
            node.size = len(node.data)
        elif stat.S_ISREG(inode.mode):
            # The current places: the tree moves its contents to blobs later.
            file, places = self.files[inode.file], inode.places
            node.content = lambda: erofs.pieces(file, places)
        return node

    def save(self) -> bytes:
        """The tree as bytes for `load`; its contents must lie in blobs."""
        numbers: dict[int, int] = {}
        inodes: list[Inode] = [self._top]
        rows = []
        for path, (inode, layer) in self._nodes.items():
            if id(inode) not in numbers:
                numbers[id(inode)] = len(inodes)
                inodes.append(inode)
            rows.append(Row(os.fsencode(path).decode("latin-1"), numbers[id(inode)], layer))
        return zstandard.compress(msgspec.msgpack.encode((rows, [_packed(inode) for inode in inodes], self.skipped)))

    def load(self, data: bytes, blobs: Sequence[BinaryIO]) -> None:
        """Continue from a saved tree whose contents lie in these blobs."""
        kind = tuple[list[Row], list[Inode], int]
        rows, inodes, self.skipped = msgspec.msgpack.decode(zstandard.decompress(data), type=kind)
        self.files = [self._spool, *blobs]
        for inode in inodes:
            inode.target = os.fsdecode(inode.target.encode("latin-1"))
        self._top = inodes[0]
        for row in rows:
            path = os.fsdecode(row.path.encode("latin-1"))
            self._nodes[path] = inodes[row.inode], row.layer
            parent, _, name = path.rpartition("/")
            self._children.setdefault(parent, set()).add(name)

    def rest_on(self, below: "Tree", blob: BinaryIO, first: int) -> None:
        """Copy all entries of the layers before `first` from another tree of the same layers, whose contents lie in
        that blob. This tree's own contents lie in one blob."""
        self.files.insert(1, blob)
        for path, (inode, layer) in self._nodes.items():
            if layer < first:
                self._nodes[path] = below._nodes[path]
            else:
                inode.file = 2

    def _content(self, inode: Inode, limit: int) -> bytes:
        if not stat.S_ISREG(inode.mode):
            return b""
        return b"".join(erofs.pieces(self.files[inode.file], inode.places))[:limit]

    def _walk(self, path: str, last: bool, make: int = -1) -> str:
        """Follow links; with `make`, missing folders are created in that layer."""
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
            if len(done) > _PATH // 2:
                raise BadImage(f"{path[:80]!r} is longer than the {_PATH} bytes of a path")
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

    def add_tar(self, entries: Iterable[Entry], layer: int) -> None:
        """Apply one layer. BadImage for what no layer may hold."""
        for member, content in entries:
            name = member.name.strip("/")
            if max(len(os.fsencode(member.name)), len(os.fsencode(member.linkname))) > _PATH:
                raise BadImage(f"{name[:80]!r} has a path or a target longer than {_PATH} bytes")
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
            self._member(member, content, f"{parent}/{last}" if parent else last, layer)

    def _member(self, member: tarfile.TarInfo, content: IO[bytes] | None, path: str, layer: int) -> None:
        if member.islnk():
            target = self._walk(member.linkname.strip("/"), last=False)
            linked = self.get(target)
            if linked is None or stat.S_ISDIR(linked.mode):
                raise BadImage(f"{path!r} is a hard link to {member.linkname!r}, which is not there")
            self._put(path, linked, layer)
        elif content is not None:
            inode = _inode(member, stat.S_IFREG)
            inode.places, inode.size = ((self._store(content), member.size),), member.size
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
        """Add a folder of this host unchanged; its links are not followed. OSError."""
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
                first_link = seen.get((status.st_dev, status.st_ino))
                if first_link is not None:
                    self._put(path, first_link, 0)
                    continue
                inode = _status(status, kind)
                if kind == stat.S_IFLNK:
                    inode.target = os.readlink(full)
                elif kind == stat.S_IFREG:
                    fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW)
                    with os.fdopen(fd, "rb") as source:
                        offset = self._store(source)
                    inode.size = self._spool.tell() - offset
                    inode.places = ((offset, inode.size),)
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
            raise BadImage(f"it unpacks to more than {self._most >> 20} MiB, which is more than a drive holds")

    def _put(self, path: str, inode: Inode, layer: int) -> None:
        if len(os.fsencode(path)) > _PATH or len(os.fsencode(path.rpartition("/")[2])) > _NAME:
            raise BadImage(f"{path[:80]!r} is longer than {_PATH} bytes, or a part of it longer than {_NAME}")
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
        """Remove the entries that layers under `below` put at a path; a folder stays while it holds a newer entry."""
        for name in list(self._children.get(path, ())):
            self._drop(f"{path}/{name}", below)
        node = self._nodes.get(path)
        if node is None or node[1] >= below or self._children.get(path):
            return
        del self._nodes[path]
        self._children.pop(path, None)
        parent, _, name = path.rpartition("/")
        self._children[parent].discard(name)


def _inode(member: tarfile.TarInfo, kind: int) -> Inode:
    if min(member.uid, member.gid) < 0 or max(member.uid, member.gid) >= 1 << 32:
        raise BadImage(f"{member.name!r} has an owner that does not exist: {member.uid}:{member.gid}")
    mtime = min(max(int(member.mtime), 0), (1 << 32) - 1)
    inode = Inode(kind | member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime=mtime)
    for key, text in member.pax_headers.items():
        if key.startswith(_XATTR):
            name, value = key.removeprefix(_XATTR), os.fsencode(text)
            # Those of overlayfs are the host's own: an image must not hide files of its lower layers by them.
            if erofs.can_hold(name, value) and not name.startswith("trusted."):
                inode.xattrs = inode.xattrs | {name: value}
    return inode


def _status(status: os.stat_result, kind: int) -> Inode:
    mtime = min(max(int(status.st_mtime), 0), (1 << 32) - 1)
    return Inode(kind | stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid, mtime=mtime)


def _packed(inode: Inode) -> Inode:
    """Text that msgpack can encode: names are bytes, and some names are not UTF-8."""
    return msgspec.structs.replace(inode, target=os.fsencode(inode.target).decode("latin-1"))
