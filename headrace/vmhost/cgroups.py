"""Control groups for processes of the host: the kernel then enforces what a machine or a local sandbox may use.

A QEMU gets limits for its memory (guest and emulator) and its threads, so that a guest that escaped its emulator's own
limits is killed alone. A sandbox of the process backend gets a limit for its number of processes, and a sandbox whose
task limits its processors or memory gets those limits too. Otherwise the processor is not divided. The folder that
holds a process's groups has the weight of as many processes as it holds groups, so a hundred machines and an actor
compete as a hundred and one processes. With the kernel's own weight all machines of a node together would count as one
process, and would starve as soon as other processes are busy.

Groups are made under version 2, inside or beside the group of this process, if controllers can be enabled there (as
root of the machine, or in a systemd unit with ``Delegate=yes`` and ``DelegateSubgroup=actors``), or under version 1
below the groups of this process. Where neither is possible there are none, and `headrace check` says what is
missing. Folders left by processes that ended are removed.

Source: Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from headrace.messages.tasks import SandboxLimits

_log = logging.getLogger("headrace.vmhost")
END_S = 60.0
THREADS = 64
"""Limit of a QEMU with one virtual processor; it has 4 to 10."""
_MEMORY, _PROCESSES = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)
_WEIGHTS = {"cpu.weight": (100, 10_000), "cpu.shares": (1024, 262_144)}
"""The weight of one process in version 2 and in version 1, and the largest weight that the kernel takes."""
_PERIOD_US = 100_000
"""A group with N processors may run N times this long in each such period (the kernel's default)."""


class Places(NamedTuple):
    """Folders below which groups are made: one under version 2, one per controller under version 1."""

    folders: tuple[Path, ...]
    limits: tuple[str, ...]
    """Controllers that are available."""


class Group:
    """One control group. Close it after its last process ended."""

    def __init__(self, folders: list[Path], refused: Sequence[str] = ()) -> None:
        self._folders = folders
        self.refused = tuple(refused)
        """Limits that the kernel does not take, and why: they do not hold."""

    @property
    def join(self) -> list[str]:
        """Files into which a process writes ``0`` to enter the group."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def add(self, pid: int) -> None:
        """Move a process into the group; one that has ended already is ignored."""
        for path in self.join:
            with suppress(OSError):
                Path(path).write_text(str(pid))

    def kill(self) -> None:
        """Kill its processes. One that forks meanwhile may leave another."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                held = os.pidfd_open(pid)
                try:
                    # The process may have ended since, and its number be another's: what is held is checked again.
                    if pid in self.members():
                        signal.pidfd_send_signal(held, signal.SIGKILL)
                finally:
                    os.close(held)

    def members(self) -> set[int]:
        """Pids of its processes."""
        pids: set[int] = set()
        for path in self.join:
            with suppress(OSError):
                pids |= {int(line) for line in Path(path).read_text().split()}
        return pids - {0}  # a process that this one's PID namespace does not see

    async def end(self) -> None:
        """Kill the processes of the group until it can be removed, for `END_S` at most: the next process sweeps what is
        left."""
        deadline = time.monotonic() + END_S
        while not self.close() and time.monotonic() < deadline:
            self.kill()
            await asyncio.sleep(0.01)

    def close(self) -> bool:
        """Remove the group. False while a process is still in it."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()
            _weigh(folder.parent)
            with suppress(OSError):
                folder.parent.rmdir()  # succeeds with the last group of this process
        return not any(folder.exists() for folder in self._folders)


@lru_cache(1)
def places() -> Places | None:
    """Where this process can make groups; None if nowhere. The answer is cached."""
    for folders, limits in (_version_2(), _version_1()):
        if limits:
            for folder in folders:
                _sweep(folder)
            return Places(folders, limits)
    return None


def lacks(limits: SandboxLimits) -> str:
    """Why groups cannot enforce these limits on this machine; empty when they can. Groups do not limit the disk."""
    wanted = {"memory": limits.memory_mib, "cpu": limits.vcpus}
    have = places()
    missing = [name for name, value in wanted.items() if value and (have is None or name not in have.limits)]
    if not missing:
        return ""
    return f"it has no control groups for {' and '.join(missing)} (`headrace check` says what is missing)"


def create(name: str, *, processes: int, memory_mb: int = 0, vcpus: int = 0) -> Group | None:
    """A new group with limits (0: no limit), see `Group.refused`; None where there are no control groups."""
    available = places()
    if available is None:
        return None
    made: list[Path] = []
    refused: list[str] = []
    quota = vcpus * _PERIOD_US
    limits: tuple[tuple[tuple[str, ...], int | str], ...] = (
        (_MEMORY, memory_mb << 20),
        (_PROCESSES, processes),
        (("cpu.cfs_quota_us",), quota),
        (("cpu.max",), f"{quota} {_PERIOD_US}" if quota else ""),
    )
    for place in available.folders:
        try:
            folder = _folder_of_this_process(place) / name
            folder.mkdir()
        except OSError as error:  # another program changed the folder's rights
            refused.append(f"a group below {place}: {error.strerror}")
            continue
        made.append(folder)
        _weigh(folder.parent)
        for files, value in limits:
            for file in files:
                if value and (folder / file).exists():
                    try:
                        (folder / file).write_text(str(value))
                    except OSError as error:
                        refused.append(f"{file} = {value}: {error.strerror}")
    return Group(made, refused)


def enclose(pid: int, memory_mb: int, vcpus: int = 1) -> Group | None:
    """Move a QEMU that has just started into a group of its own; None where there are no control groups.

    A machine also runs without its group or one of the limits: they are a second bound around its own memory. The log
    then says once which limits do not hold.
    """
    group = create(str(pid), processes=THREADS + vcpus, memory_mb=memory_mb)
    if group is None:
        _warn("machines get no control groups: only their own memory limits them; `headrace check` says why")
    else:
        group.add(pid)
        if group.refused:
            _warn(f"machines run without limits that the kernel refuses: {'; '.join(group.refused)}")
    return group


@lru_cache(64)
def _warn(text: str) -> None:
    """Log a warning, once."""
    _log.warning(text)


def _version_2() -> tuple[tuple[Path, ...], tuple[str, ...]]:
    mount, group = _mount_point("cgroup2", ""), _group_of_this_process("")
    if mount is None or group is None:
        return (), ()
    here = mount / group.lstrip("/")
    # Only the machine's root group may hold processes and have children with controllers at the same time. In any other
    # group, the new ones are made beside this one, which needs rights in the group above.
    place = here if not (here / "cgroup.type").exists() else here.parent
    wanted: tuple[str, ...] = ("memory", "pids")
    with suppress(OSError):
        if all(name in (place / "cgroup.controllers").read_text().split() for name in wanted):
            (place / "cgroup.subtree_control").write_text("+memory +pids")
            with suppress(OSError):
                (place / "cgroup.subtree_control").write_text("+cpu")
                wanted = (*wanted, "cpu")
            _folder_of_this_process(place)
            return (place,), wanted
    return (), ()


def _version_1() -> tuple[tuple[Path, ...], tuple[str, ...]]:
    folders, names = [], []
    for name in ("memory", "pids", "cpu"):
        mount, group = _mount_point("cgroup", name), _group_of_this_process(name)
        if mount is not None and group is not None and os.access(mount / group.lstrip("/"), os.W_OK):
            folders.append(mount / group.lstrip("/"))
            names.append(name)
    return tuple(folders), tuple(names)


def _folder_of_this_process(place: Path) -> Path:
    """The folder that holds this process's groups, made where it is missing. OSError."""
    folder = place / f"headrace-{os.getpid()}"
    if not folder.exists():
        folder.mkdir()
        if (folder / "cgroup.subtree_control").exists():
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
            with suppress(OSError):
                (folder / "cgroup.subtree_control").write_text("+cpu")
    return folder


def _weigh(folder: Path) -> None:
    """Give the folder of a process's groups the weight of as many processes as it holds groups.

    Without a controller for processors there is nothing to weigh. The kernel counts a folder's subfolders in its links.
    """
    for name, (of_one, most) in _WEIGHTS.items():
        with suppress(OSError):  # the folder has no such file, or was removed
            if (folder / name).exists():
                (folder / name).write_text(str(min(of_one * max(folder.stat().st_nlink - 2, 1), most)))


def _mount_point(kind: str, controller: str) -> Path | None:
    """Where a hierarchy is mounted; an empty controller fits any."""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, mounted, options, *_ = line.split()
            if mounted == kind and (not controller or controller in options.split(",")):
                return Path(place)
    return None


def _group_of_this_process(controller: str) -> str | None:
    """The group of this process in a controller's hierarchy; version 2 is listed with an empty controller."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path
    return None


def _sweep(place: Path) -> None:
    """Remove the groups of killed processes; the kernel refuses to remove a group that still holds a process."""
    for parent in place.glob("headrace-*"):
        if not Path("/proc", parent.name.partition("-")[2]).exists():
            for folder in [*_subfolders(parent), parent]:
                with suppress(OSError):
                    folder.rmdir()


def _subfolders(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in parent.iterdir() if path.is_dir()]
