"""The capacity of a node for one more machine: memory, processors, disk.

Memory: every machine may grow to its full size, so the part that running machines have not used yet counts as used.
Processors: the recent use by all machines is measured; a node whose machines keep it busy starts no further machine for
training, which can wait or go elsewhere, but still starts machines for users and the judge. Disk: a sandbox whose
`disk_mib` exceeds what its memory can hold has a disk, and every disk may grow to its full size as well; templates that
must be built need space, too.
"""

import os
import shutil
from collections import deque
from pathlib import Path

from headrace.machine_memory import available_bytes
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.errors import VmhostError

OVERHEAD_MB = 96
"""Memory of a QEMU besides its guest's: translated code, tables, heap."""
RESERVE_MB = 256
"""Memory that stays free for everything else on the node."""
DISK_RESERVE_MB = 1024
"""Disk that stays free for everything else on the node."""
DISK_MOST_MB = 64 << 10
"""Size of the largest disk: that of every drive (`store.DRIVE_BYTES`)."""
SAMPLE_S = 1.0
SAMPLES = 5
"""Seconds between two samples of processor time, and number of samples that count."""


class Processors:
    """How busy the machines keep the node. limit: share of the processors from which it counts as busy; 0: never."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def sample(self, at: float, cpu_ms: float) -> None:
        """Record the CPU-ms that all machines have used so far, at a time in seconds."""
        self._samples.append((at, cpu_ms))

    def busy(self) -> float:
        """Share of the node's processors that the machines use; 0 until there are enough samples."""
        if len(self._samples) < SAMPLES:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / 1000 / max(last - first, 1e-3) / len(os.sched_getaffinity(0))

    def short(self) -> str:
        """Why no further machine should start; empty when it may."""
        busy = self.busy()
        if not self._limit or busy < self._limit:
            return ""
        return f"its machines use {busy:.0%} of the processors, and the limit is {self._limit:.0%}"


def upper_mib(memory_mib: int, limits: SandboxLimits) -> int:
    """Capacity of an image's writable layer: its limit, or three quarters of the sandbox's memory."""
    return limits.disk_mib or memory_mib * 3 // 4


def on_disk(memory_mib: int, limits: SandboxLimits) -> bool:
    """Whether an image's writable layer lies on a disk: three quarters of the sandbox's memory are too small."""
    return limits.disk_mib > memory_mib * 3 // 4


def disks_short(place: Path, size_mb: float, growth_mb: float) -> str:
    """Why a disk of this size does not fit beside others that may still grow by `growth_mb`; empty when it does.
    VmhostError where it never can."""
    usage = shutil.disk_usage(place)
    most = min(usage.total / 2**20 - DISK_RESERVE_MB, DISK_MOST_MB)
    if size_mb > most:
        raise VmhostError(f"the task's disk_mib is {size_mb:.0f}, and a disk in {place} has at most {most:.0f}")
    left = usage.free / 2**20 - growth_mb - DISK_RESERVE_MB
    if left >= size_mb:
        return ""
    return f"too little disk is free: {size_mb:.0f} MB are needed in {place}, {max(left, 0):.0f} are left"


def memory_short(size_mb: float, growth_mb: float) -> str:
    """Why a machine of this size does not fit beside others that may still grow by `growth_mb`; empty when it does."""
    left = free_mb() - growth_mb - RESERVE_MB
    needs = size_mb + OVERHEAD_MB
    return "" if left >= needs else f"too little memory is free: {needs:.0f} MB are needed, {max(left, 0):.0f} are left"


def disk_short(place: Path, size_mb: float) -> str:
    """Why something of this size cannot be created at that path; empty when it can."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**20
    return "" if free >= size_mb else f"too little disk: {size_mb:.0f} MB are needed in {place}, {free:.0f} are left"


def whole_mb() -> float:
    """MB of memory of this node, or of its control group where that has a limit."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**20)
    except (OSError, ValueError):
        return whole


def free_mb() -> float:
    """MB of memory that could be used now: the kernel's estimate, or less if the control group's limit leaves less."""
    free = (available_bytes() or 0) / 2**20
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
