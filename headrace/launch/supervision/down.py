"""Ends a run's processes from outside: first in order, then by force, until none is left.

The lock of the runs' folder names the process of `headrace up`. The first SIGTERM lets the run drain, the second ends
it at once, SIGKILL comes last. Processes that remain are found by the run's folder in their command line, and killed.
`down` waits for a killed process as long as a busy machine needs to end it, so that it is not reported as remaining.
"""

import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

AT_ONCE_S = 5.0
"""After the second SIGTERM: the time to end without a drain."""
KILLED_S = 60.0
"""After SIGKILL: the time for the kernel to end a process. It is over sooner unless the disk hangs."""
BY_THEMSELVES_S = 1.0
"""After `headrace up`: the time for its children, which the kernel kills with it."""


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
        for number, wait_s, outcome in (
            (signal.SIGTERM, patience_s, "it ended in order"),
            (signal.SIGTERM, AT_ONCE_S, f"it had not drained after {patience_s:g} s, so it ended at once"),
            (signal.SIGKILL, KILLED_S, f"it had not ended after {patience_s + AT_ONCE_S:g} s, so it was killed"),
        ):
            how = outcome
            if _signal([supervisor], number, wait_s):
                break
    # The kernel kills the children of a killed parent; only processes of an earlier `up` can remain.
    deadline = time.monotonic() + BY_THEMSELVES_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(left, signal.SIGKILL, KILLED_S)
    return Ended(supervisor, how, len(left), len(processes_of(folder)))


def _signal(pids: Iterable[int], number: int, wait_s: float) -> bool:
    """Send a signal to all of them; True when all have ended within the time."""
    with ExitStack() as closing:
        handles = []
        for pid in pids:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                closing.callback(os.close, handle)
                handles.append(handle)
                signal.pidfd_send_signal(handle, number)
        deadline = time.monotonic() + wait_s
        return all(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0] for handle in handles)
