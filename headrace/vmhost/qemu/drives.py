"""The files behind a machine's drives, as descriptors that QEMU inherits.

A template is booted with empty drives of the size that every blob of the image store is padded to. A clone gets the
blobs of its image instead, and empty ones for the rest. The disk of a writable layer is a sparse file without a name:
it is gone once its machine has ended.
"""

import os
import subprocess
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import store
from headrace.vmhost.images.imported import Image
from headrace.vmhost.node import capacity
from headrace.vmhost.qemu.memory import Memory, descriptor
from headrace.vmhost.qemu.process import Hardware

MKFS = "mkfs.ext4"
FORMAT_S = 60.0
"""Time limit of `MKFS`; 0.1 s on a quiet machine."""


class Disk:
    """The disk of a writable layer: a sparse file of a drive's size, with an empty file system of `size_mib` at its
    beginning. It is closed when its last user drops it."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        """Blocks. VmhostError."""
        self.size_mib = size_mib
        try:
            self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise VmhostError(f"no disk for a sandbox can be made in {folder}: {error.strerror}") from None
        self.close = weakref.finalize(self, os.close, self.fd)
        """Close it now instead."""
        # Nothing needs a journal, because nothing mounts the disk again after a crash.
        line = [MKFS, "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=1"]
        line += [descriptor(self.fd), f"{size_mib}m"]
        try:
            os.ftruncate(self.fd, store.DRIVE_BYTES)
            done = subprocess.run(line, pass_fds=(self.fd,), capture_output=True, text=True, timeout=FORMAT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise VmhostError(f"{MKFS} did not format a disk: {error}; apt-get install e2fsprogs") from None
        if done.returncode:
            raise VmhostError(f"{MKFS} could not format a disk of {size_mib} MiB: {done.stderr.strip()[-200:]}")

    @property
    def growth_mb(self) -> float:
        """MB that it may still take on the node."""
        return max(0.0, self.size_mib - os.fstat(self.fd).st_blocks * 512 / 2**20)


def disk_short(folder: Path, size_mib: int, disks: Iterable[Disk | None], reserved: int) -> str:
    """Why there cannot be another disk of this size beside those that exist and as many reserved ones; empty when there
    can, or for size 0. VmhostError where there never can."""
    if not size_mib:
        return ""
    growth = sum(disk.growth_mb for disk in disks if disk is not None)
    return capacity.disks_short(folder, size_mib, growth + reserved * size_mib)


def open_drives(hardware: Hardware, image: Image | None = None, disk: Disk | None = None) -> list[int]:
    """Descriptors for the drives of a machine, which the caller closes. disk: behind the writable drive; None: an empty
    file. VmhostError when the image's files are gone."""
    fds: list[int] = []
    try:
        if image is not None:
            fds += store.open_blobs(image.segments())
        # QEMU needs a descriptor with exactly the rights that it asks for: this one is read-only.
        fds += [os.open(_empty().path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(hardware.drives - len(fds))]
        if hardware.disk:
            behind = disk or Memory("headrace-disk", store.DRIVE_BYTES)
            fds.append(os.dup(behind.fd))
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise VmhostError(f"the drives cannot be opened: {error.strerror or error}") from None
    return fds


@cache
def _empty() -> Memory:
    """A file of a drive's size without content: all of it is a hole, and it takes no memory."""
    return Memory("headrace-empty", store.DRIVE_BYTES)
