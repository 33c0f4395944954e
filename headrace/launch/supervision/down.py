"""Ends a run's processes from outside: first in order, then by force, until none is left.

The lock of the runs' folder names the process of `headrace up`. The first SIGTERM lets the run drain, the second ends
it at once, SIGKILL comes last. Processes that remain are found by the run's folder in their command line, and killed.
"""

import fcntl
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """The result of `down`."""

    supervisor: int
    """Process id of `headrace up`; 0 when none was active."""
    how: str
    leftovers: int
    """Processes of the run that had to be killed afterwards."""
    remaining: int


def supervisor_of(root: Path) -> int:
    """Process id of the active `headrace up` in a runs' folder; 0 when there is none."""
    try:
        with (root / ".active").open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(handle.read().removeprefix("pid ").strip() or 0)
    except (OSError, ValueError):
        pass
    return 0


def processes_of(folder: Path) -> list[int]:
    """Process ids whose command line names the run's folder: its actors and its broker."""
    mark = os.fsencode(str(folder.resolve())) + b"/"
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if any(word.startswith(mark) for word in words):
                    out.append(int(entry.name))
    return out


def down(root: Path, folder: Path, patience_s: float) -> Ended:
    """End the run. root: the runs' folder; folder: the run's. patience_s: for its drain, before force is used."""
    supervisor = supervisor_of(root)
    how = "no process of `headrace up` was active"
    if supervisor:
        how = "it did not end, so it was killed"
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
            if _signal_and_wait(supervisor, number, wait_s):
                how = "it ended in order" if number == signal.SIGTERM else how
                break
    # Children of a killed parent get their own signal from the kernel; only those of an older run are left over.
    deadline = time.monotonic() + 1.0
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        _signal_and_wait(pid, signal.SIGKILL, 1.0)
    return Ended(supervisor, how, len(left), len(processes_of(folder)))


def _signal_and_wait(pid: int, number: int, wait_s: float) -> bool:
    """Send a signal; True when the process has ended within the time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(handle, number)
        return bool(select.select([handle], [], [], wait_s)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)
