"""The processes of a trainer's ranks."""

import os
from pathlib import Path


def ranks_of(starter: int = 0) -> list[int]:
    """The ranks that a process has started and that still run. starter: 0 for this process."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == (starter or os.getpid()) and b"headrace.training.parallel.rank" in command:
            pids.append(int(entry.name))
    return sorted(pids)
