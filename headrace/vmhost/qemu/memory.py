"""A machine's memory as QEMU gets it: an anonymous file, passed as a descriptor.

QEMU opens its memory file for writing even if it maps it privately. With the template's own file, a QEMU without
privileges would need write permission on the memory that all clones share. A sealed memfd can be opened for writing and
never be written (memfd_create(2), F_SEAL_WRITE); private mappings of it copy on write as usual. QEMU also needs no path
of the host's file system: `/proc/self/fd` leads to inherited descriptors and nowhere else.

Trade-off: a template in use occupies RAM once per process that runs clones of it (204 MiB for the light one, copied in
0.14 s), while the page cache could drop a file. In return, later changes of the file do not reach its clones.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

from headrace.vmhost.errors import VmhostError

_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4 | 0x8
"""F_ADD_SEALS; no more seals, no shrinking, no growing, no writing."""
_PIECE = 16 << 20


class Memory:
    """An anonymous file of a fixed size. It is closed when its last user drops it."""

    def __init__(self, name: str, size: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        """Close it now instead."""
        os.ftruncate(self.fd, size)
        self.path = descriptor(self.fd)
        """The path under which a process that inherits the descriptor opens it."""
        self.mapped = f"/memfd:{name} (deleted)"
        """Its name in /proc/PID/maps."""

    @property
    def resident_mb(self) -> float:
        """MiB of memory that it occupies, holes left out."""
        return os.fstat(self.fd).st_blocks * 512 / 2**20

    def save(self, target: Path) -> None:
        """Write its content to a sparse file. OSError."""
        with target.open("wb") as out:
            os.ftruncate(out.fileno(), os.fstat(self.fd).st_size)
            _copy(self.fd, out.fileno())


def descriptor(fd: int) -> str:
    """The path under which a process opens a descriptor that it inherited."""
    return f"/proc/self/fd/{fd}"


_sealed: "WeakValueDictionary[tuple[Path, tuple[int, ...]], Memory]" = WeakValueDictionary()


def sealed(ram: Path, stamp: tuple[int, ...], name: str) -> Memory:
    """A template's memory, read once and never changed; `stamp` identifies the state of its file. VmhostError."""
    cached = _sealed.get((ram, stamp))
    if cached is not None:
        return cached
    try:
        with ram.open("rb") as source:
            made = Memory(f"headrace-{name}", os.fstat(source.fileno()).st_size)
            _copy(source.fileno(), made.fd)
        fcntl.fcntl(made.fd, _ADD_SEALS, _SEALS)
    except OSError as error:
        raise VmhostError(f"the memory of template {name} cannot be read from {ram}: {error.strerror}") from None
    _sealed[ram, stamp] = made
    return made


def _copy(source: int, target: int) -> None:
    """Copy the data; holes stay holes."""
    for begin, end in _data(source):
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            moved = os.sendfile(target, source, begin, min(_PIECE, end - begin))
            if not moved:
                raise OSError(5, "the file became shorter while it was read")
            begin += moved


def _data(fd: int) -> Iterator[tuple[int, int]]:
    size, at = os.fstat(fd).st_size, 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, at
