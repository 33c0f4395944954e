"""Reads the memory of this machine that is available, from /proc/meminfo (proc(5))."""

from pathlib import Path


def available_bytes() -> int | None:
    """The kernel's estimate of the memory that is available without swapping, in bytes. None from a kernel that does
    not tell it, which is one before 3.14."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None
