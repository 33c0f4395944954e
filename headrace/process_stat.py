"""Reads the state of processes from /proc/PID/stat (proc(5)), and counts how long one is stopped.

The name of a process stands in parentheses in the line, and it may hold spaces, parentheses, line ends and bytes that
are no UTF-8; so the other fields are read behind the last closing parenthesis.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

LOOK_S = 5.0
"""Seconds between two looks at whether a process is stopped."""
STOPPED_S = 120.0
"""Seconds for which a process may be stopped by a signal, before who started it kills it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    """Some fields of the line."""

    state: str
    """One letter: ``T`` is stopped by a signal, ``t`` by a debugger, ``Z`` ended and not waited for."""
    parent: int
    """Process id of its parent."""
    session: int
    """Process id of its session's leader."""
    cpu_s: float
    """CPU time of the process so far, in user and kernel mode, in seconds."""
    reaped_cpu_s: float
    """CPU time of its children that have ended and were waited for, in seconds."""


def read(pid: int) -> ProcessStat | None:
    """The fields of a process; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    user, kernel, reaped_user, reaped_kernel = (int(field) / _TICKS_PER_S for field in fields[11:15])
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[3]), user + kernel, reaped_user + reaped_kernel)


class Stops:
    """Counts for how long a signal (SIGSTOP, SIGTSTP) has stopped a process. One that a debugger holds (state ``t``)
    does not count.

    Looks are counted and not seconds, so the time in which the looking process itself is stopped does not count.
    """

    def __init__(self) -> None:
        self._looks, self._pid = 0, 0

    def seconds(self, pid: int, look_s: float) -> float:
        """Look at a process, 0 for none. Returns the seconds for which the same one was stopped at every look."""
        self._looks = self._looks + 1 if self.state(pid) == "T" and pid == self._pid else 0
        self._pid = pid
        return self._looks * look_s

    @staticmethod
    def state(pid: int) -> str:
        """State of a process; empty when there is no such process."""
        stat = read(pid) if pid else None
        return stat.state if stat is not None else ""


def stopped_too_long(pid: int) -> str:
    """The sentence about a process that is killed because it was stopped for `STOPPED_S`."""
    return (
        f"process {pid} was stopped by a signal for {STOPPED_S:g} s and is killed; to stop a process for longer, "
        "attach a debugger, or continue it in time with kill -CONT"
    )


def everything() -> Iterator[tuple[int, ProcessStat]]:
    """All processes that this process sees, with their ids. A process that ends in between is left out."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read(int(name))) is not None:
            yield int(name), stat
