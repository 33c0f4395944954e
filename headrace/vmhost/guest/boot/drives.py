"""A machine's image on drives: read-only file systems over one another, and a writable layer above them (overlayfs).
The writable layer is in memory, or on a disk, which is then the last drive.

The template is booted with empty drives, its slot already forked and waiting. In a clone the drives hold the image that
the host chose, and `attach` mounts it. The mounts are made here, in the first process's namespace, which shares them
with the slot until the slot takes its own copy: so this process sees the writable layer, and no program of the slot
does.

Sources: Linux Documentation/filesystems/overlayfs.rst, mount_namespaces(7).
"""

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..files import Answer
from . import syscalls
from .syscalls import NODEV, PRIVATE, RDONLY, REC, mount

IMAGE, LOWER, UPPER = "/image", "/lower", "/upper"
_FLUSH_BUFFERS = 0x1261
_SHARED = 1 << 20
_APPEAR_S = 30
PATIENCE_S = 60


def devices(count: int) -> list[str]:
    """Paths of the drives hr0 to hr<count-1>, by their serial numbers. RuntimeError when one does not appear."""
    by_serial: dict[str, str] = {}
    deadline = time.monotonic() + _APPEAR_S
    while len(by_serial) < count and time.monotonic() < deadline:
        for name in os.listdir("/sys/block"):
            with suppress(OSError), open(f"/sys/block/{name}/serial") as file:
                by_serial[file.read().strip()] = f"/dev/{name}"
        time.sleep(0.01)
    if len(by_serial) < count:
        raise RuntimeError(f"{len(by_serial)} of {count} drives appeared within {_APPEAR_S} s")
    return [by_serial[f"hr{number}"] for number in range(count)]


def share_mounts(count: int) -> None:
    """Make the folders of the mounts, and let later mounts appear in the slots that are forked from now on."""
    for path in (IMAGE, UPPER, LOWER, *(f"{LOWER}/{number}" for number in range(count))):
        os.makedirs(path, exist_ok=True)
    mount("none", "/", "", REC | _SHARED)


def keep_mounts() -> None:
    """In a slot: copy the mounts, and keep only the image in the copy."""
    mount("none", "/", "", REC | PRIVATE)
    for path in (UPPER, *(f"{LOWER}/{number}" for number in range(len(os.listdir(LOWER))))):
        syscalls.libc.umount2(path.encode(), syscalls.DETACH)


def forget(paths: Sequence[str]) -> None:
    """Drop the data that the kernel read from the empty drives, because a clone's drives hold other data."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        fcntl.ioctl(fd, _FLUSH_BUFFERS)
        os.close(fd)
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def attach(paths: Sequence[str], count: int, size: str, disk: bool) -> None:
    """Mount the image of the first `count` drives, the bottom first. size: capacity of a writable layer in memory, as
    tmpfs writes it; disk: whether the last drive is the writable layer's. OSError."""
    attach_at("", paths[:count], size, paths[-1] if disk else "")


def attach_at(root: str, paths: Sequence[str], size: str, disk: str = "") -> None:
    """The same below a folder, with the folders of the mounts where they are missing. disk: the device of the writable
    layer; empty: it is in memory. OSError."""
    lower = [f"{root}{LOWER}/{number}" for number in range(len(paths))]
    for folder in (root + IMAGE, root + UPPER, *lower):
        os.makedirs(folder, exist_ok=True)
    for path, folder in zip(paths, lower, strict=True):
        mount(path, folder, "erofs", RDONLY | NODEV)
    if disk:
        mount(disk, root + UPPER, "ext4", NODEV)
    else:
        mount("upper", root + UPPER, "tmpfs", NODEV, f"size={size},mode=755")
    for name in ("files", "work"):
        os.mkdir(f"{root}{UPPER}/{name}")
    status = os.stat(lower[-1])
    os.chmod(f"{root}{UPPER}/files", status.st_mode & 0o7777)
    os.chown(f"{root}{UPPER}/files", status.st_uid, status.st_gid)
    layers = f"lowerdir={':'.join(reversed(lower))},upperdir={root}{UPPER}/files,workdir={root}{UPPER}/work"
    # A moved folder is copied, so that the writable layer alone says what changed.
    mount("image", root + IMAGE, "overlay", NODEV, f"{layers},redirect_dir=off,metacopy=off,index=off,xino=off")


def changes(header: dict[str, Any]) -> Answer:
    """The changes that the image's programs made (see guest/changes.py)."""
    from .. import changes

    lower = [f"{LOWER}/{number}" for number in reversed(range(header["drives"]))]
    return changes.walk(f"{UPPER}/files", lower, header["skip"], header["limit"], header["originals"])
