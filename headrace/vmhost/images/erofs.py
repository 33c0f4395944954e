"""Writes EROFS file systems: read-only, uncompressed, in one pass, from an index of inodes.

Why our own writer: contents go from the spool of the layers straight into the blob, without a copy of the tree on disk,
without root's rights, and with equal bytes for equal trees. Debian's erofs-utils cannot read archives, and a first read
of squashfs costs more (docs/isolation.md).

Sources: Linux fs/erofs/erofs_fs.h (version 6.1) and Documentation/filesystems/erofs.rst. All inodes are extended (64
bytes, whole seconds of mtime). Short tails of files, link targets and folders lie beside their inodes.
"""

import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import msgspec

BLOCK = 4096
_MAGIC, _SUPER_AT, _SUPER = 0xE0F5E1E2, 1024, 128
_SLOT = 32
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_DIRENT = struct.Struct("<QHBx")
_XATTR_HEAD, _XATTR = 12, struct.Struct("<BBH")
_PLAIN, _INLINE = 0, 2
_TAIL = 2048
"""Longest tail that lies beside its inode."""
_KINDS = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFLNK: 7}
_PREFIXES = {"user.": 1, "trusted.": 4, "security.": 6}
_PIECE = 1 << 20

Content = Callable[[], Iterator[bytes]]


class Node(msgspec.Struct, eq=False):
    """An inode to be written."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    data: bytes = b""
    """Content of a link or a folder."""
    content: Content | None = None
    """Content of a file, in pieces."""
    xattrs: Mapping[str, bytes] = {}
    links: int = 1
    children: dict[bytes, "Node"] | None = None
    """Entries of a folder."""
    at: int = 0
    """Offset of the inode in the file system, once it is placed."""
    block: int = 0
    """First block of the contents outside the inode."""

    @property
    def number(self) -> int:
        """Its number: the offset in slots."""
        return self.at // _SLOT


Places = tuple[tuple[int, int], ...]
"""(offset, size) of the parts of a content."""


def write(out: BinaryIO, top: Node) -> dict[int, Places]:
    """Write the tree below `top`. Returns the places of the contents, by the identity of their nodes. A node may have
    several names. OSError."""
    nodes = _in_order(top)
    packed = {id(node): _xattrs(node.xattrs) for node in nodes}
    end = _SUPER_AT + _SUPER
    for node in nodes:
        if node.children is not None:
            node.size = _folder_size(node.children)
        tail = _tail(node)
        length = _INODE.size + len(packed[id(node)]) + tail
        # A tail must lie in the block in which it begins, and here all of an inode does.
        if end % BLOCK + length > BLOCK:
            end += BLOCK - end % BLOCK
        node.at = end
        end += -(-length // _SLOT) * _SLOT
    block = -(-end // BLOCK)
    for node in nodes:
        node.block = block
        block += node.size // BLOCK if _tail(node) else -(-node.size // BLOCK)
    meta = bytearray(-(-end // BLOCK) * BLOCK)
    _super(meta, top, len(nodes), block)
    for number, node in enumerate(nodes, 1):
        if node.children is not None:
            node.data = _folder(node, top)
        _inode(meta, node, number, packed[id(node)])
    out.write(meta)
    places: dict[int, Places] = {}
    for node in nodes:
        places[id(node)] = _contents(out, meta, node, packed[id(node)])
    out.seek(0)
    out.write(meta)
    out.seek(0, 2)
    out.write(bytes(-out.tell() % BLOCK))
    return places


def _in_order(top: Node) -> list[Node]:
    """Every node once: a folder, then its entries, by name; the contents of one folder lie together."""
    nodes, seen, folders = [top], {id(top)}, [top]
    while folders:
        folder = folders.pop()
        assert folder.children is not None
        inner = []
        for _, child in sorted(folder.children.items()):
            if id(child) in seen:
                continue
            seen.add(id(child))
            nodes.append(child)
            if child.children is not None:
                inner.append(child)
        folders += reversed(inner)
    return nodes


def _tail(node: Node) -> int:
    """Bytes that lie beside the inode."""
    tail = node.size % BLOCK
    return tail if 0 < tail <= _TAIL else 0


def _xattrs(xattrs: Mapping[str, bytes]) -> bytes:
    entries = b""
    for name, value in sorted(xattrs.items()):
        prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
        short = name.removeprefix(prefix).encode()
        entry = _XATTR.pack(len(short), _PREFIXES[prefix], len(value)) + short + value
        entries += entry + bytes(-len(entry) % 4)
    return bytes(_XATTR_HEAD) + entries if entries else b""


def can_hold(name: str, value: bytes) -> bool:
    """Whether an extended attribute can be stored."""
    return name.startswith(tuple(_PREFIXES)) and len(name) < 250 and len(value) <= 1024


def _names(children: Mapping[bytes, Node]) -> Iterator[list[bytes]]:
    """The names of a folder with ``.`` and ``..``, as many as fit into each block."""
    block: list[bytes] = []
    used = 0
    for name in sorted([b".", b"..", *children]):
        if used + _DIRENT.size + len(name) > BLOCK:
            yield block
            block, used = [], 0
        block.append(name)
        used += _DIRENT.size + len(name)
    yield block


def _folder_size(children: Mapping[bytes, Node]) -> int:
    *full, last = _names(children)
    return BLOCK * len(full) + sum(_DIRENT.size + len(name) for name in last)


def _folder(node: Node, top: Node) -> bytes:
    assert node.children is not None
    out = bytearray()
    for names in _names(node.children):
        out += bytes(-len(out) % BLOCK)
        place = len(names) * _DIRENT.size
        for name in names:
            # The parent's number of ".." is not read by the kernel, which knows the path that it walked.
            child = node.children.get(name, top if name == b".." else node)
            out += _DIRENT.pack(child.number, place, _KINDS[stat.S_IFMT(child.mode)])
            place += len(name)
        out += b"".join(names)
    return bytes(out)


def _super(meta: bytearray, top: Node, inodes: int, blocks: int) -> None:
    words = struct.pack("<IIIBBHQQIIII", _MAGIC, 0, 0, 12, 0, top.number, inodes, 0, 0, blocks, 0, 0)
    meta[_SUPER_AT : _SUPER_AT + len(words)] = words


def _inode(meta: bytearray, node: Node, number: int, xattrs: bytes) -> None:
    tail = _tail(node)
    layout = _INLINE if tail else _PLAIN
    count = (len(xattrs) - _XATTR_HEAD) // 4 + 1 if xattrs else 0
    block = 0 if stat.S_ISCHR(node.mode) else node.block
    links = 2 + sum(child.children is not None for child in node.children.values()) if node.children is not None else 0
    fields = (1 | layout << 1, count, node.mode, 0, node.size, block, number)
    words = _INODE.pack(*fields, node.uid, node.gid, node.mtime, 0, links or node.links) + xattrs
    meta[node.at : node.at + len(words)] = words


def _contents(out: BinaryIO, meta: bytearray, node: Node, xattrs: bytes) -> Places:
    """Write the blocks of a node and put its tail beside the inode."""
    tail = _tail(node)
    whole = node.size - tail
    beside = node.at + _INODE.size + len(xattrs)
    start = out.tell()
    written = 0
    for piece in node.content() if node.content is not None else (node.data,):
        here = piece[: max(0, whole - written)]
        out.write(here)
        rest = piece[len(here) :]
        if rest:
            offset = beside + written + len(here) - whole
            meta[offset : offset + len(rest)] = rest
        written += len(piece)
    if written != node.size:
        raise OSError(5, "a file became shorter while it was read")
    out.write(bytes(-out.tell() % BLOCK))
    return tuple(place for place in ((start, whole), (beside, tail)) if place[1])


def pieces(file: BinaryIO, places: Places) -> Iterator[bytes]:
    """The content at some places of a file, in pieces."""
    for offset, size in places:
        file.seek(offset)
        while size and (piece := file.read(min(size, _PIECE))):
            size -= len(piece)
            yield piece
