"""Reads EROFS blobs as the kernel documents them: written apart from the package's writer."""

import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple


class Found(NamedTuple):
    """One path."""

    mode: int
    uid: int
    gid: int
    links: int
    inode: object
    data: bytes
    mtime: int


def read(path: Path, number: int = 0) -> dict[str, Found]:
    """All paths of one file system; the root is ``""``."""
    with path.open("rb") as file:
        image = file.read(_blocks(path) * 4096)
    files: dict[str, Found] = {}

    def walk(name: str, nid: int) -> None:
        at = nid * 32
        form, xattrs, mode, _, size, block, _, uid, gid, mtime, _, links = struct.unpack_from(
            "<HHHHQIIIIQII", image, at
        )
        assert form & 1, "an extended inode"
        beside = at + 64 + (12 + 4 * (xattrs - 1) if xattrs else 0)
        tail = size % 4096 if form >> 1 & 7 == 2 else 0
        data = b"" if stat.S_ISCHR(mode) else image[block * 4096 : block * 4096 + size - tail]
        data += image[beside : beside + tail]
        if tail:
            assert beside // 4096 == (beside + tail - 1) // 4096, "a tail lies in one block"
        files[name] = Found(mode, uid, gid, links, (number, nid), data, mtime)
        if stat.S_ISDIR(mode):
            for start in range(0, size, 4096):
                part = data[start : start + 4096]
                count = struct.unpack_from("<QHB", part, 0)[1] // 12
                entries = [struct.unpack_from("<QHB", part, 12 * n) for n in range(count)]
                ends = [entry[1] for entry in entries[1:]] + [len(part)]
                names = [part[entry[1] : end].rstrip(b"\0") for entry, end in zip(entries, ends, strict=True)]
                assert names == sorted(names)
                for child, entry in zip(names, entries, strict=True):
                    if child not in (b".", b".."):
                        walk(f"{name}/{os.fsdecode(child)}".lstrip("/"), entry[0])

    walk("", struct.unpack_from("<H", image, 1024 + 14)[0])
    return files


def _blocks(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(1152)[1024:]
    assert struct.unpack_from("<I", head)[0] == 0xE0F5E1E2
    return int(struct.unpack_from("<I", head, 36)[0])


def merged(paths: list[Path]) -> dict[str, Found]:
    """File systems over one another, the bottom first, as overlayfs shows them."""
    whole: dict[str, Found] = {}
    for number, path in enumerate(paths):
        for name, entry in read(path, number).items():
            old = whole.get(name)
            if old is not None and not (stat.S_ISDIR(old.mode) and stat.S_ISDIR(entry.mode)):
                for inner in [inner for inner in whole if inner == name or inner.startswith(f"{name}/")]:
                    del whole[inner]
            if not stat.S_ISCHR(entry.mode):
                whole[name] = entry
    return whole
