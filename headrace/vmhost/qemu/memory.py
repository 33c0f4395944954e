"""A machine's memory as QEMU gets it: an anonymous file, handed over as a descriptor.

Why not the template's own file: QEMU opens it for writing even where it maps it privately, so a QEMU without
privileges would need write permission on the memory that all clones share. A sealed memfd may be opened for writing by
anyone and is written by nobody (memfd_create(2), F_SEAL_WRITE); private mappings copy on write as ever. Nor does QEMU
need to see a single path of the host's: `/proc/self/fd` leads to what it was given and nowhere else.

Trade-off: a template in use lies in RAM once per process that runs clones of it (204 MiB for the light one, copied in
0.14 s), where the page cache could have let go of it. What happens to its file meanwhile no longer reaches its clones.
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
    """An anonymous file of a size. It closes with its last user."""

    def __init__(self, name: str, size: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        """Now; or when nobody holds it any more."""
        os.ftruncate(self.fd, size)
        self.path = descriptor(self.fd)
        """What a process that inherits it opens."""
        self.mapped = f"/memfd:{name} (deleted)"
        """As which it shows in /proc/PID/maps."""

    def save(self, target: Path) -> None:
        """Its content as a file with holes. OSError."""
        with target.open("wb") as out:
            os.ftruncate(out.fileno(), os.fstat(self.fd).st_size)
            _copy(self.fd, out.fileno())


def descriptor(fd: int) -> str:
    """The path under which a process opens a descriptor that it inherited."""
    return f"/proc/self/fd/{fd}"


_sealed: "WeakValueDictionary[tuple[Path, tuple[int, ...]], Memory]" = WeakValueDictionary()


def sealed(ram: Path, stamp: tuple[int, ...], name: str) -> Memory:
    """A template's memory, read once and never changed again; `stamp` tells one state of its file from another.
    VmhostError when it can't be had."""
    known = _sealed.get((ram, stamp))
    if known is not None:
        return known
    try:
        with ram.open("rb") as source:
            made = Memory(f"headrace-{name}", os.fstat(source.fileno()).st_size)
            _copy(source.fileno(), made.fd)
        fcntl.fcntl(made.fd, _ADD_SEALS, _SEALS)
    except OSError as error:
        raise VmhostError(f"the memory of template {name} can't be taken from {ram}: {error.strerror}") from None
    _sealed[ram, stamp] = made
    return made


def _copy(source: int, target: int) -> None:
    """What is data; holes stay holes."""
    for begin, end in _data(source):
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            moved = os.sendfile(target, source, begin, min(_PIECE, end - begin))
            if not moved:
                raise OSError(5, "it became shorter while it was read")
            begin += moved


def _data(fd: int) -> Iterator[tuple[int, int]]:
    size, at = os.fstat(fd).st_size, 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole
            return
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, at
