"""A report of what only root can change in a running machine: modules, mounts of the slots, settings, processes.

The host compares it with the template's report (qemu/integrity.py). An attacker who controls the kernel can forge this
report, but has then written to pages that the host checks by itself. An attacker who only became root is found here.
"""

import os
from collections.abc import Iterator, Sequence

SETTINGS = tuple(f"/proc/sys/{name}" for name in ("kernel", "vm", "fs", "user"))
"""Network settings are left out: each slot has its own."""
COUNTERS = frozenset({"/proc/sys/kernel/ns_last_pid"})
"""Writable files that the kernel itself changes."""
CGROUPS = "/sys/fs/cgroup"
_KTHREADD = b"2"
_paths: list[str] = []
_kernels: set[bytes] = set()
"""Pids that were found to be kernel threads."""


def report(slots: Sequence[int]) -> dict[str, str]:
    """The report as text by name. slots: pids of the slots' first processes."""
    if not _paths:
        _paths.extend(path for folder in SETTINGS for path in _settings(folder))
    report = {"modules": b" ".join(sorted(line.split()[0] for line in _read("/proc/modules").splitlines()))}
    report |= {"processes": b" ".join(sorted(_strays())), "groups": " ".join(sorted(_cgroups())).encode()}
    report |= {path: _read(path) for path in _paths}
    return mounts(slots) | {name: text.decode("utf-8", "replace") for name, text in report.items()}


def mounts(slots: Sequence[int]) -> dict[str, str]:
    """The mounts of the slots."""
    return {
        f"mounts of slot {number}": _read(f"/proc/{pid}/mountinfo").decode("utf-8", "replace")
        for number, pid in enumerate(slots)
    }


def _settings(folder: str) -> Iterator[str]:
    """Paths of all settings that root can read and write."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _settings(entry.path)
            elif entry.stat(follow_symlinks=False).st_mode & 0o600 == 0o600 and entry.path not in COUNTERS:
                yield entry.path


def _strays() -> Iterator[bytes]:
    """Names of processes that are in no slot's control group and are not kernel threads."""
    for pid in _read(f"{CGROUPS}/cgroup.procs").split():
        if pid not in _kernels:
            head, _, tail = _read(f"/proc/{pid.decode()}/stat").rpartition(b")")
            if pid == _KTHREADD or tail.split()[1:2] == [_KTHREADD]:
                _kernels.add(pid)
            elif head:
                yield head.partition(b"(")[2]


def _cgroups() -> list[str]:
    return [name for name in os.listdir(CGROUPS) if "." not in name]


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        text = piece = os.read(fd, 65536)
        while len(piece) >= 4000 and (piece := os.read(fd, 65536)):
            text += piece
        return text
    except OSError:
        return b""
    finally:
        os.close(fd)
