"""Writes initramfs archives (cpio, "newc"): the one format that a Linux kernel unpacks by itself at boot.

Archives may follow one another in one initrd, so the agent's few files are an archive of their own behind the large
base: changing the agent does not repack the base.
"""

import os
import stat
from collections.abc import Iterable
from typing import BinaryIO

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One member: path without leading slash, full mode, content (a link's target for links).

    Hard links: the same `inode` and number of `links` in each, the content in the first alone.
    """

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    links: int = 0
    inode: int = 0


def folder(name: str, mode: int = 0o755) -> Entry:
    """A folder."""
    return Entry(name, stat.S_IFDIR | mode)


def file(name: str, data: bytes, mode: int = 0o644) -> Entry:
    """A regular file."""
    return Entry(name, stat.S_IFREG | mode, data)


def link(name: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def device(name: str, major: int, minor: int, mode: int = 0o666) -> Entry:
    """A character device."""
    return Entry(name, stat.S_IFCHR | mode, b"", (major, minor))


def write(out: BinaryIO, entries: Iterable[Entry]) -> None:
    """An archive of the entries, owned by root and dated 1970 unless they say otherwise, so that equal contents give
    equal bytes."""
    for number, entry in enumerate(entries, 1):
        _member(out, number, entry)
    _member(out, 0, Entry("TRAILER!!!", 0))


def _member(out: BinaryIO, number: int, entry: Entry) -> None:
    name = os.fsencode(entry.name) + b"\0"
    links = entry.links or (2 if stat.S_ISDIR(entry.mode) else 1)
    owner = (entry.inode or number, entry.mode, entry.uid, entry.gid, links, entry.mtime)
    fields = (*owner, len(entry.data), 0, 0, *entry.device, len(name), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name
    out.write(head + b"\0" * (-len(head) % 4))
    out.write(entry.data + b"\0" * (-len(entry.data) % 4))
