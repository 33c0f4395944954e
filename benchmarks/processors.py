"""Samples the CPU time of a running cell by part: trainer, sampler, judge, environment, its machines, and the rest.

A part's CPU time includes the children of its processes. Those of the environment are the machines; machines that have
ended count as well, because the environment waits for their processes.
"""

import bisect
import threading
import time
from collections import defaultdict
from pathlib import Path

from headrace import process_stat

PARTS = {"trainer": "trainer", "rollout": "sampler", "judge": "judge"}
"""Actors to the part of the process that runs them."""
EVERY_S = 0.5


class Processors(threading.Thread):
    """CPU-seconds by part, every `EVERY_S` until `stop`."""

    def __init__(self, up: int, environment: int) -> None:
        """up: process id of `headrace up`. environment: that of the benchmark's environment actor."""
        super().__init__(daemon=True)
        self._roots = {up: "rest", environment: "environment"}
        self._parts: dict[int, str] = {}
        self._over = threading.Event()
        self.samples: list[tuple[float, dict[str, float]]] = []

    def run(self) -> None:
        """Sample until the end."""
        while True:
            self.samples.append((time.time(), self._read()))
            if self._over.wait(EVERY_S):
                return

    def stop(self) -> None:
        """Take the last sample."""
        self._over.set()
        self.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU-seconds by part from the last sample at or before begin to the first one at or after end, scaled to the
        time between begin and end. Empty without samples on both sides."""
        times = [at for at, _ in self.samples]
        first, last = bisect.bisect_right(times, begin) - 1, bisect.bisect_left(times, end)
        if first < 0 or last >= len(times) or last <= first:
            return {}
        (since, before), (until, after) = self.samples[first], self.samples[last]
        scale = (end - begin) / (until - since)
        return {part: (spent - before.get(part, 0.0)) * scale for part, spent in sorted(after.items())}

    def _read(self) -> dict[str, float]:
        stats = dict(process_stat.everything())
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, stat in stats.items():
            children[stat.parent].append(pid)
        spent: dict[str, float] = defaultdict(float)
        left = [(pid, part) for pid, part in self._roots.items() if pid in stats]
        while left:
            pid, part = left.pop()
            below = "machines" if part == "environment" else part
            spent[part] += stats[pid].cpu_s
            spent[below] += stats[pid].reaped_cpu_s
            left += [(child, self._part(child, below)) for child in children[pid]]
        return dict(spent)

    def _part(self, pid: int, parent: str) -> str:
        """A process's own part if it runs actors, otherwise its parent's."""
        if parent != "rest":
            return parent
        if (known := self._parts.get(pid)) is None:
            try:
                argv = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                return parent
            names = argv[argv.index("actor") + 1].split(",") if "actor" in argv[:-1] else []
            self._parts[pid] = known = next((PARTS[name] for name in names if name in PARTS), parent)
        return known
