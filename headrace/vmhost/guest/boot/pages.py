"""Finds the page frames that no legitimate work changes: those of the root's files and of the kernel's text.

The root is a tmpfs, so its pages are the files themselves: the text of every program, the byte code of the standard
library, the slot agent. Their frame numbers come from `/proc/self/pagemap` (readable by root alone, see Linux
Documentation/admin-guide/mm/pagemap.rst), those of the kernel from `/proc/iomem`. The host stores the list with the
template and checks the frames from outside (vmhost/qemu/integrity.py); the guest takes no part in a check.

A page must stay in its frame, but the kernel moves pages when it needs many consecutive frames. So every file is mapped
and locked once, while the template is built, and compaction is configured to leave locked pages alone.
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
"""The root of an imported image, which the image's user may change."""
_pinned: dict[tuple[int, int], tuple[str, int, int]] = {}
"""(device, inode) -> path, address, number of pages."""


def report() -> dict[str, Any]:
    """The lists that the host needs. OSError when a page has no frame.

    ``files``: (path, runs of frames as first, count, first, count ...); ``memory``: lines of /proc/iomem; ``symbols``:
    addresses of the kernel symbols in `SYMBOLS`, as far as the kernel shows them.
    """
    with suppress(OSError):
        _write("/proc/sys/vm/compact_unevictable_allowed", "0")
    for path, status in _files("/", os.lstat("/").st_dev):
        identity = status.st_dev, status.st_ino
        if status.st_size and identity not in _pinned:
            _pinned[identity] = path, _pin(path, status.st_size), -(-status.st_size // mmap.PAGESIZE)
    with open("/proc/iomem") as file:
        ranges = [line.strip() for line in file if "Kernel" in line or "System RAM" in line]
    table = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        files = [(path, _frames(table, path, address, count)) for path, address, count in _pinned.values()]
    finally:
        os.close(table)
    return {"files": files, "memory": ranges, "symbols": _symbols()}


def _files(folder: str, device: int) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below a folder, on its file system only."""
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
    """Map and lock a file permanently. Returns the address of the mapping."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED | _LOCKED | _POPULATE, fd, 0)
    finally:
        os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
    return int(address)


def _frames(table: int, path: str, address: int, count: int) -> Sequence[int]:
    entries = array.array("Q", os.pread(table, 8 * count, address // mmap.PAGESIZE * 8))
    runs: list[int] = []
    for entry in entries:
        frame = entry & _FRAME if entry & _PRESENT else 0
        if not frame:
            raise OSError(5, f"{path} has a page without a frame")
        if runs and frame == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (frame, 1)
    return runs


def _symbols() -> dict[str, int]:
    setting = "/proc/sys/kernel/kptr_restrict"
    with open(setting) as file:
        before = file.read()
    _write(setting, "1")  # shows addresses to root
    try:
        wanted = re.compile(rf"([0-9a-f]+) \w ({'|'.join(SYMBOLS)})\n")
        with open("/proc/kallsyms") as file:
            symbols = [wanted.fullmatch(line) for line in file]
    finally:
        _write(setting, before)
    return {symbol[2]: int(symbol[1], 16) for symbol in symbols if symbol}


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
