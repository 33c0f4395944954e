"""What only root could have changed in a running machine: modules, the slots' mounts, settings, stray processes.

The host compares it with what the template answered (vmhost/integrity.py). Who owns the kernel can lie here, and has
then left marks where the host looks by itself; who merely became root is found by this.
"""

import os
from collections.abc import Iterator, Sequence

SETTINGS = tuple(f"/proc/sys/{name}" for name in ("kernel", "vm", "fs", "user"))
"""Those of the network are each slot's own."""
COUNTERS = frozenset({"/proc/sys/kernel/ns_last_pid"})
"""Writable, and written by the kernel itself. What else moves there is not writable."""
GROUPS = "/sys/fs/cgroup"
_KTHREADD = b"2"
_paths: list[str] = []
_kernels: set[bytes] = set()
"""Processes that are known to be the kernel's own."""


def report(slots: Sequence[int]) -> dict[str, str]:
    """All of it as text by name; `slots`: the first process of each."""
    if not _paths:
        _paths.extend(path for folder in SETTINGS for path in _settings(folder))
    found = {"modules": b" ".join(sorted(line.split()[0] for line in _read("/proc/modules").splitlines()))}
    found |= {f"mounts of slot {number}": _read(f"/proc/{pid}/mountinfo") for number, pid in enumerate(slots)}
    found |= {"processes": b" ".join(sorted(_strays())), "groups": " ".join(sorted(_groups())).encode()}
    found |= {path: _read(path) for path in _paths}
    return {name: text.decode("utf-8", "replace") for name, text in found.items()}


def _settings(folder: str) -> Iterator[str]:
    """Every setting that root can write and read."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _settings(entry.path)
            elif entry.stat(follow_symlinks=False).st_mode & 0o600 == 0o600 and entry.path not in COUNTERS:
                yield entry.path


def _strays() -> Iterator[bytes]:
    """Names of processes that are in no slot's group and not the kernel's."""
    for pid in _read(f"{GROUPS}/cgroup.procs").split():
        if pid not in _kernels:
            head, _, tail = _read(f"/proc/{pid.decode()}/stat").rpartition(b")")
            if pid == _KTHREADD or tail.split()[1:2] == [_KTHREADD]:
                _kernels.add(pid)
            elif head:
                yield head.partition(b"(")[2]


def _groups() -> list[str]:
    return [name for name in os.listdir(GROUPS) if "." not in name]


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
