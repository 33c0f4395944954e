"""The share of this machine's processors and GPUs that is in use, by all of its processes.

Heartbeats carry it, and the live page shows it beside the run's own figures.
"""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.metrics import process
from headrace.metrics.gpus import gpus, installed

_STAT = Path("/proc/stat")
PERIOD_S = 1.0
"""Shortest time over which a share is measured: several actors of a process ask one after the other."""


class Use(NamedTuple):
    """Shares between 0 and 1; None where it is not known."""

    cpu: float | None = None
    gpu: float | None = None
    """Mean over the machine's GPUs; None without one."""


class MachineUse:
    """Measures between two calls of `take`."""

    def __init__(self, stat: Path = _STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat, self._clock = stat, clock
        self._before = _times(stat)
        self._taken = clock()
        self._cpu: float | None = None
        self._gpu: float | None = None
        if installed():  # a driver may take seconds, and the caller is an event loop
            threading.Thread(target=self._watch_gpus, name="gpu-use", daemon=True).start()

    def take(self) -> Use:
        """The use since the last measurement; the last measurement again within `PERIOD_S`."""
        now = self._clock()
        if now - self._taken >= PERIOD_S:
            after = _times(self._stat)
            if self._before is not None and after is not None:
                total = after[0] - self._before[0]
                self._cpu = min(1.0, max(0.0, (after[1] - self._before[1]) / total)) if total > 0 else self._cpu
            self._before, self._taken = after, now
        return Use(self._cpu, self._gpu)

    def _watch_gpus(self) -> None:
        devices = gpus()
        has_gpus = bool(devices)
        while has_gpus:  # also once the driver answers for none of them
            process.gpus(len(devices))
            told = [gpu.busy for gpu in devices if gpu.busy is not None]
            self._gpu = sum(told) / len(told) if told else None
            time.sleep(PERIOD_S)
            devices = gpus()


@functools.cache
def machine_use() -> MachineUse:
    """The measurement of this process."""
    return MachineUse()


def _times(stat: Path) -> tuple[int, int] | None:
    """Ticks of all processors so far: in total, and those in use. None where the kernel shows none."""
    try:
        words = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]  # guests are counted in user already
        idle = ticks[3] + ticks[4]  # idle, and idle with an open read or write
    except (OSError, ValueError, IndexError):
        return None
    return (sum(ticks), sum(ticks) - idle) if words[0] == "cpu" else None
