"""The files behind a machine's drives, as descriptors that QEMU inherits.

A template is booted with empty drives of the size that every blob of the image store is padded to. A clone gets the
blobs of its image instead, and empty ones for the rest.
"""

import os
from functools import cache

from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import store
from headrace.vmhost.images.imported import Image
from headrace.vmhost.qemu.memory import Memory


def open_drives(count: int, image: Image | None = None) -> list[int]:
    """Descriptors for the drives of a machine, which the caller closes. VmhostError when the image's files are gone."""
    fds: list[int] = []
    try:
        if image is not None:
            fds += store.open_blobs(image.segments())
        # QEMU needs a descriptor with exactly the rights that it asks for: this one is read-only.
        fds += [os.open(_empty().path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count - len(fds))]
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise VmhostError(f"the drives cannot be opened: {error.strerror or error}") from None
    return fds


@cache
def _empty() -> Memory:
    """A file of a drive's size without content: all of it is a hole, and it takes no memory."""
    return Memory("headrace-empty", store.DRIVE_BYTES)
