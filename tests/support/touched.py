"""Pages of a running machine that no honest work writes, and a write into one from outside."""

import os

import msgspec
import numpy as np

from headrace.vmhost.qemu import snapshot
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.integrity import KERNEL, PAGE, Fixed


def fixed(clone: Clone) -> Fixed:
    """The pages of that machine that no honest work writes."""
    return msgspec.msgpack.decode((clone.template.folder / "fixed").read_bytes(), type=Fixed)


def owners(known: Fixed) -> list[tuple[int, str]]:
    """Every fixed page and its owner."""
    table = np.frombuffer(known.ranges, "<u4").reshape(-1, 3).tolist()
    ranges = [(first, count, known.names[name]) for first, count, name in table] + [(*known.text, KERNEL)]
    return [(page, name) for first, count, name in ranges for page in range(first, first + count)]


def page_of(clone: Clone, path: str) -> int:
    """The first page of a file of the root file system."""
    return next(page for page, name in owners(fixed(clone)) if name == path)


def overwrite(clone: Clone, page: int, data: bytes, offset: int = 0) -> bytes:
    """Write into a page of a running machine's memory. Returns the bytes before. OSError, VmhostError."""
    low, _ = snapshot.mapping(clone.pid, clone._memory.mapped)
    memory = os.open(f"/proc/{clone.pid}/mem", os.O_RDWR)
    try:
        place = low + page * PAGE + offset
        before = os.pread(memory, len(data), place)
        if os.pwrite(memory, data, place) != len(data):
            raise OSError(5, "a page could not be written")
        return before
    finally:
        os.close(memory)
