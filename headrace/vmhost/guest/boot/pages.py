"""Which pages of the machine's memory nothing honest ever changes: those of the root's files and of the kernel's text.

The root lies in memory, so the pages of the page cache are the files themselves: the text of every program, the byte
code of the standard library, this agent. Their frames come from `/proc/self/pagemap` (root alone sees frames there, see
Documentation/admin-guide/mm/pagemap.rst), the kernel's from `/proc/iomem`. The host keeps that list with the template
and looks by itself, from outside (vmhost/integrity.py); nothing here takes part in a look.

A page must stay in its frame, and the kernel moves pages when it needs many frames in a row. So files stay mapped and
locked, and compaction is told to leave locked pages alone. That is one mapping a file, in the template, once.
"""

import array
import ctypes
import mmap
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LOCKED, _POPULATE = 0x2000, 0x8000
_FRAME, _PRESENT = (1 << 55) - 1, 1 << 63
SYMBOLS = ("_text", "__start___jump_table", "__stop___jump_table")
OTHERS = "/image"
"""An imported image's root, which its own user may change."""
_pinned: dict[tuple[int, int], tuple[str, int, int]] = {}
"""(device, inode) to path, address and number of pages."""


def report() -> dict[str, Any]:
    """``files``: path and its frames as first, count, first, count ...; ``memory``: lines of /proc/iomem; ``symbols``:
    the kernel's addresses of `SYMBOLS`, as far as it tells. OSError when a page has no frame."""
    with suppress(OSError):
        _write("/proc/sys/vm/compact_unevictable_allowed", "0")
    for path, status in _files("/", os.lstat("/").st_dev):
        known = status.st_dev, status.st_ino
        if status.st_size and known not in _pinned:
            _pinned[known] = path, _pin(path, status.st_size), -(-status.st_size // mmap.PAGESIZE)
    with open("/proc/iomem") as file:
        ranges = [line.strip() for line in file if "Kernel" in line or "System RAM" in line]
    table = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        files = [(path, _frames(table, path, address, count)) for path, address, count in _pinned.values()]
    finally:
        os.close(table)
    return {"files": files, "memory": ranges, "symbols": _symbols()}


def _files(folder: str, device: int) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below a folder, on its file system."""
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if status.st_dev != device or entry.path == OTHERS:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from _files(entry.path, device)
            elif stat.S_ISREG(status.st_mode):
                yield entry.path, status


def _pin(path: str, size: int) -> int:
    """Address at which a file is mapped from now on."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED | _LOCKED | _POPULATE, fd, 0)
    finally:
        os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"{path} can't be mapped")
    return int(address)


def _frames(table: int, path: str, address: int, count: int) -> Sequence[int]:
    entries = array.array("Q", os.pread(table, 8 * count, address // mmap.PAGESIZE * 8))
    runs: list[int] = []
    for entry in entries:
        frame = entry & _FRAME if entry & _PRESENT else 0
        if not frame:
            raise OSError(5, f"{path} has a page that is nowhere")
        if runs and frame == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (frame, 1)
    return runs


def _symbols() -> dict[str, int]:
    secret = "/proc/sys/kernel/kptr_restrict"
    with open(secret) as file:
        before = file.read()
    _write(secret, "1")  # root may see them
    try:
        wanted = re.compile(rf"([0-9a-f]+) \w ({'|'.join(SYMBOLS)})\n")
        with open("/proc/kallsyms") as file:
            found = [wanted.fullmatch(line) for line in file]
    finally:
        _write(secret, before)
    return {one[2]: int(one[1], 16) for one in found if one}


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
