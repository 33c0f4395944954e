"""What a node has left for another machine: memory, processors, disk. Nothing is promised that it does not have.

Memory: every machine may grow to its full size, so what those that run have not taken yet counts as taken. Processors:
what all machines used lately, measured; a node whose machines keep it busy starts no further one for training, which
can wait or go elsewhere, while users and the judge are let in. Disk: machines use none; templates that must be made do.
"""

import os
import shutil
from collections import deque
from pathlib import Path

OVERHEAD_MB = 96
"""What a QEMU takes beside its guest's memory: translated code, tables, heap."""
RESERVE_MB = 256
"""Memory that stays free for everything else on the node."""
LOOK_S = 1.0
LOOKS = 5
"""Seconds between two looks at the processors, and looks that count."""


class Processors:
    """How busy machines keep the node. limit: the share from which it is too much; 0 for never."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._looks: deque[tuple[float, float]] = deque(maxlen=LOOKS)

    def look(self, at: float, cpu_ms: float) -> None:
        """CPU-ms that all machines have ever used, at a time in seconds."""
        self._looks.append((at, cpu_ms))

    def busy(self) -> float:
        """Share of the node's processors; 0 before as many looks as count."""
        if len(self._looks) < LOOKS:
            return 0.0
        (begun, before), (ended, after) = self._looks[0], self._looks[-1]
        return (after - before) / 1000 / max(ended - begun, 1e-3) / len(os.sched_getaffinity(0))

    def short(self) -> str:
        """Why no further machine should start; empty when one may."""
        busy = self.busy()
        if not self._limit or busy < self._limit:
            return ""
        return f"its machines use {busy:.0%} of the processors, and the limit is {self._limit:.0%}"


def memory_short(size_mb: float, growth_mb: float) -> str:
    """Why a machine of that size does not fit beside others that may yet grow so much; empty when it does."""
    left = free_mb() - growth_mb - RESERVE_MB
    needs = size_mb + OVERHEAD_MB
    return "" if left >= needs else f"too little memory is free: {needs:.0f} MB are needed, {max(left, 0):.0f} are left"


def disk_short(place: Path, size_mb: float) -> str:
    """Why something of that size can't be made there; empty when it can."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**20
    return "" if free >= size_mb else f"too little disk: {size_mb:.0f} MB are needed in {place}, {free:.0f} are left"


def free_mb() -> float:
    """Memory that could be used now: what the kernel says, and what our cgroup leaves."""
    free = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) / 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            stats = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            reclaimable = int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0))
            free = min(free, (int(limit) - used + reclaimable) / 2**20)
    except (OSError, ValueError):
        pass
    return free
