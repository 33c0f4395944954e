"""A control group per QEMU, where control groups can be had: what a machine may take is then the kernel's to enforce.

Each gets its memory (guest and emulator) and its threads bounded, so that a guest that broke out of its emulator's
own limits is killed alone. The processor is not divided: machines and actors compete as processes do.

Where: version 2 beside or below the group that we are in, if controllers can be switched on there (as root of the
machine; in a systemd unit by ``Delegate=yes`` and ``DelegateSubgroup=actors``), or version 1 below our own groups.
Nowhere is fine too: `doctor` then says what is missing. Folders of processes that are gone are removed.

Source: Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

THREADS = 64
"""Of a QEMU with one virtual processor: 4 to 10 are seen."""
_MEMORY, _THREADS = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)


class Places(NamedTuple):
    """Folders below which groups are made: one under version 2, one a controller under version 1."""

    folders: tuple[Path, ...]
    limits: tuple[str, ...]
    """Controllers that are there."""


class Group:
    """One machine's. It ends after its process."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def close(self) -> None:
        """Remove it."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()
            with suppress(OSError):
                folder.parent.rmdir()  # after the last machine


@lru_cache(1)
def places() -> Places | None:
    """Where groups can be made, looked for once; None where nowhere."""
    for folders, limits in (_version_2(), _version_1()):
        if limits:
            for folder in folders:
                _sweep(folder)
            return Places(folders, limits)
    return None


def enclose(pid: int, memory_mb: int) -> Group | None:
    """Put a process that has just begun into a group of its own; None where there are no groups."""
    found = places()
    if found is None:
        return None
    made = []
    for place in found.folders:
        try:
            folder = _ours(place) / str(pid)
            folder.mkdir()
            made.append(folder)
            for names, value in ((_MEMORY, memory_mb << 20), (_THREADS, THREADS), (("cgroup.procs",), pid)):
                for name in names:
                    if (folder / name).exists():
                        (folder / name).write_text(str(value))
        except OSError:  # it may have died already, or someone took the folder's rights away
            continue
    return Group(made)


def _version_2() -> tuple[tuple[Path, ...], tuple[str, ...]]:
    mount, own = _mounted("cgroup2", ""), _own("")
    if mount is None or own is None:
        return (), ()
    here = mount / own.lstrip("/")
    # Only the machine's root group may hold processes and divide among groups at once; else the one above must be ours.
    place = here if not (here / "cgroup.type").exists() else here.parent
    wanted = ("memory", "pids")
    with suppress(OSError):
        if all(name in (place / "cgroup.controllers").read_text().split() for name in wanted):
            (place / "cgroup.subtree_control").write_text("+memory +pids")
            _ours(place)
            return (place,), wanted
    return (), ()


def _version_1() -> tuple[tuple[Path, ...], tuple[str, ...]]:
    folders, names = [], []
    for name in ("memory", "pids"):
        mount, own = _mounted("cgroup", name), _own(name)
        if mount is not None and own is not None and os.access(mount / own.lstrip("/"), os.W_OK):
            folders.append(mount / own.lstrip("/"))
            names.append(name)
    return tuple(folders), tuple(names)


def _ours(place: Path) -> Path:
    """The folder of this process's machines. OSError."""
    ours = place / f"headrace-{os.getpid()}"
    if not ours.exists():
        ours.mkdir()
        if (ours / "cgroup.subtree_control").exists():
            (ours / "cgroup.subtree_control").write_text("+memory +pids")
    return ours


def _mounted(kind: str, controller: str) -> Path | None:
    """Where a hierarchy is mounted."""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, what, options, *_ = line.split()
            if what == kind and (not controller or controller in options.split(",")):
                return Path(place)
    return None


def _own(controller: str) -> str | None:
    """Our own group in a hierarchy; version 2 has no controller's name."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path
    return None


def _sweep(place: Path) -> None:
    """Remove what processes left that were killed; the kernel lets no group go that still has one inside."""
    for ours in place.glob("headrace-*"):
        if not Path("/proc", ours.name.partition("-")[2]).exists():
            for folder in [*_folders(ours), ours]:
                with suppress(OSError):
                    folder.rmdir()


def _folders(ours: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in ours.iterdir() if path.is_dir()]
