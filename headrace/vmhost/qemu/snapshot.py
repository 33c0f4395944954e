"""A running clone as its difference from the template: the pages that it wrote, and the state of its devices.

A clone maps its template's memory privately, so the kernel knows which pages are its own (`/proc/PID/pagemap`, Linux
Documentation/admin-guide/mm/pagemap.rst: present, and not backed by a file). Those are a few MiB of hundreds. Device
state comes from QEMU's ``xen-save-devices-state``, which despite its name saves every device of any machine and leaves
memory out; an ordinary migration stream would carry all of the memory. That stream lacks a preamble with the machine's
name and the read-only memories, which is taken from the template's state.

A copy gets the pages written into its memory before it runs its first instruction, and then loads that state. A fork
therefore costs as much as a clone, and copies share the template's memory.

numpy is imported where it computes, because `headrace check` imports this module too and has to answer at once.
"""

import os
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.vmhost.errors import VmhostError

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61
_RUN = 256
"""Largest number of pages that are read at once."""


class MachineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a machine at one moment, relative to its template."""

    state: bytes
    """The stream that a clone loads: the template's preamble and the devices."""
    numbers: bytes
    """Page numbers, little-endian u32, ascending."""
    pages: bytes
    """Their contents, end to end."""
    mounts: dict[str, str] = {}
    """The mounts of a slot that got its image after the template was made (see Clone.attach)."""

    @property
    def mib(self) -> float:
        """Size of the pages."""
        return len(self.pages) / (1 << 20)


def compose(template_state: bytes, devices: bytes) -> bytes:
    """The device state as a stream that clones of that template load. VmhostError when the two do not match.

    Both begin with magic and version; the first device's section has the same header in both.
    """
    length = devices[13] if len(devices) > 14 else 0
    first = devices[8 : 14 + length]
    if len(first) < 7 or first[0] != 4 or devices[:8] != template_state[:8] or first not in template_state:
        raise VmhostError("QEMU's device state does not match its template's: this QEMU version cannot fork")
    return template_state[: template_state.index(first)] + devices[8:]


def mapping(pid: int, name: str) -> tuple[int, int]:
    """First and last-plus-one address of a machine's memory in its process, found by the name of the mapping.
    VmhostError."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and fields[5] == name:
                    low, _, high = fields[0].partition("-")
                    return int(low, 16), int(high, 16)
    except OSError as error:
        raise VmhostError(f"the machine's memory map cannot be read: {error.strerror}") from None
    raise VmhostError("the machine does not map its template's memory")


def own_pages(pid: int, name: str) -> tuple[bytes, bytes]:
    """Numbers and contents of the pages that a stopped clone wrote. VmhostError."""
    import numpy as np

    low, high = mapping(pid, name)
    try:
        with open(f"/proc/{pid}/pagemap", "rb") as table:
            table.seek(low // PAGE * 8)
            entries = np.frombuffer(table.read((high - low) // PAGE * 8), "<u8")
        written = ((entries & _PRESENT != 0) & (entries & _FILE == 0)) | (entries & _SWAPPED != 0)
        numbers = np.flatnonzero(written).astype("<u4")
        return numbers.tobytes(), _read(pid, low, numbers)
    except OSError as error:
        raise VmhostError(f"the machine's memory cannot be read: {error.strerror}") from None


def _read(pid: int, low: int, numbers: "np.ndarray[Any, np.dtype[Any]]") -> bytes:
    out = bytearray()
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for first, count in _runs(numbers):
            piece = os.pread(memory, count * PAGE, low + first * PAGE)
            if len(piece) != count * PAGE:
                raise OSError(5, "a page could not be read")
            out += piece
    finally:
        os.close(memory)
    return bytes(out)


def put_pages(pid: int, name: str, snapshot: MachineSnapshot) -> None:
    """Write a snapshot's pages into a machine that has not run yet. VmhostError."""
    import numpy as np

    low, high = mapping(pid, name)
    numbers = np.frombuffer(snapshot.numbers, "<u4")
    if len(numbers) and int(numbers[-1]) >= (high - low) // PAGE:
        raise VmhostError("the snapshot is of a larger machine")
    view, at = memoryview(snapshot.pages), 0
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        try:
            for first, count in _runs(numbers):
                size = count * PAGE
                if os.pwrite(memory, view[at : at + size], low + first * PAGE) != size:
                    raise OSError(5, "a page could not be written")
                at += size
        finally:
            os.close(memory)
    except OSError as error:
        raise VmhostError(f"the machine's memory cannot be written: {error.strerror}") from None


def _runs(numbers: "np.ndarray[Any, np.dtype[Any]]") -> list[tuple[int, int]]:
    """(first, count) of consecutive pages, at most `_RUN` each."""
    import numpy as np

    if not len(numbers):
        return []
    wide = numbers.astype(np.int64)
    cuts = np.flatnonzero(np.diff(wide) != 1) + 1
    runs = []
    for part in np.split(wide, cuts):
        for start in range(0, len(part), _RUN):
            runs.append((int(part[start]), min(_RUN, len(part) - start)))
    return runs
