"""Reads the state of processes from /proc/PID/stat (proc(5)).

The name of a process stands in parentheses in the line, and it may hold spaces, parentheses, line ends and bytes that
are no UTF-8; so the other fields are read behind the last closing parenthesis.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

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


def everything() -> Iterator[tuple[int, ProcessStat]]:
    """All processes that this process sees, with their ids. A process that ends in between is left out."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read(int(name))) is not None:
            yield int(name), stat
