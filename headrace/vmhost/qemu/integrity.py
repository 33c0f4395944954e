"""The integrity check: was a machine changed where no legitimate work writes? The host reads its memory from outside.

A digest made by the guest is worth no more than the guest. But the host's kernel knows which pages a clone has written
(`/proc/PID/pagemap`: present, and no longer backed by the file), and a template knows which of its pages must never be
written: the root is a tmpfs, so the page cache holds every file of it, and the kernel's text and read-only data are
contiguous (guest/boot/pages.py finds them once, while the template is built). The check intersects the two. An attacker
who controls the guest's kernel can write any page, but then that page becomes the clone's own. Restoring its content
does not hide the write.

There is one legitimate change of the kernel's text: branches that are switched at run time (Linux
Documentation/staging/static-keys; here those of packet time stamps and socket filters). The kernel's jump table, in its
read-only memory, lists their addresses. At such an address the two forms of that branch are accepted, and nothing else.

In a machine with an image on drives the template's own root is checked as everywhere: the slot agent and its Python.
The image's user may change the image's files, as in any machine; QEMU opens the files behind the drives read-only.

Not covered: memory that legitimate work writes too, such as heaps and stacks of running processes, the kernel's data
and its modules. `differences` finds the changes that root can make there without writing a fixed page in the report of
the machine's first process.

numpy is imported where it computes, because `headrace check` imports this module too and has to answer at once.
"""

import os
import struct
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from headrace.vmhost import agent_files
from headrace.vmhost.errors import VmhostError

PAGE = 4096
KERNEL = "kernel"
SHOWN = 8
"""Largest number of names that a check reports."""
_AGENT = "/opt/headrace/guest/"
_4_GIB = 1 << 20
"""In pages."""
_NEAR = 64
"""Ranges closer than this many pages are read together."""
_NO_OPS = {5: bytes.fromhex("0f1f440000"), 2: bytes.fromhex("6690")}
_ENTRY = struct.Struct("<iiq")


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of a template that no legitimate work writes, and where the kernel changes its own text."""

    names: tuple[str, ...]
    """Owners of pages: `KERNEL` first, then paths of files."""
    ranges: bytes
    """First page, number of pages, index of the name: little-endian u32, in order of pages."""
    text: tuple[int, int]
    """First page of the kernel's text, and number of pages; none of it is in `ranges`."""
    sites: bytes
    """Switched branches: offset in memory and offset of their target, little-endian i64, ascending."""
    condition: dict[str, str]
    """The first process's report of what only root can change (guest/boot/condition.py)."""


class _Report(msgspec.Struct):
    files: list[tuple[str, list[int]]]
    memory: list[str]
    symbols: dict[str, int]


Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Survey = tuple[dict[str, Any], dict[str, Any]]


async def survey(ask: Ask) -> Survey:
    """The fixed pages and the condition of a machine that is about to be frozen."""
    return await ask({"op": "pages"}), await ask({"op": "condition"})


def write(folder: Path, surveyed: Survey) -> None:
    """Write ``fixed`` beside the memory of a template. VmhostError when survey and memory do not fit each other."""
    (folder / "fixed").write_bytes(msgspec.msgpack.encode(fixed(*surveyed, folder / "ram")))


def fixed(pages: dict[str, Any], condition: dict[str, Any], ram: Path) -> Fixed:
    """The survey in page numbers of the memory file. VmhostError when the agent's files are not where it says."""
    import numpy as np

    try:
        report = msgspec.convert(pages, _Report)
        memory = np.memmap(ram, np.uint8, "r")
        areas = [_area(line) for line in report.memory]
        # Memory that does not fit below the device addresses lies above 4 GiB, and last in the file.
        shift = max(end for _, end, name in areas if name == "System RAM") - len(memory)
        names, ranges = [KERNEL], []
        for path, frames in report.files:
            for frame, count in zip(frames[::2], frames[1::2], strict=True):
                ranges.append((frame - (shift // PAGE if frame >= _4_GIB else 0), count, len(names)))
            names.append(path)
        named = {area[2]: area for area in areas}
        code = named["Kernel code"]
        ranges.append((*_pages(named["Kernel rodata"]), 0))
        sites = _sites(memory, code, report.symbols)
        table = np.array(sorted(ranges), "<u4")
        _check(memory, names, table)
    except (msgspec.ValidationError, ValueError, LookupError, OSError, OverflowError) as error:
        raise VmhostError(f"the template's memory cannot be mapped to files: {error or type(error).__name__}") from None
    return Fixed(
        names=tuple(names),
        ranges=table.tobytes(),
        text=_pages(code) if sites else (0, 0),
        sites=np.array(sites, "<i8").tobytes(),
        condition={name: str(text) for name, text in condition.items()},
    )


def _check(memory: Any, names: list[str], table: Any) -> None:
    """ValueError when the agent's files are not at their pages: then no other file is either."""
    import numpy as np

    if int((table[:, 0].astype(np.int64) + table[:, 1]).max()) * PAGE > len(memory):
        raise ValueError("a page lies beyond the end of the memory")
    begins = {names[name]: int(first) * PAGE for first, _, name in table[::-1]}
    for name, source in agent_files.sources().items():
        at, expected = begins.get(f"{_AGENT}{name}"), source[:PAGE]
        if at is not None and memory[at : at + len(expected)].tobytes() != expected:
            raise ValueError(f"{name} is not where it should be")


def _area(line: str) -> tuple[int, int, str]:
    """A line of /proc/iomem as first byte, last byte plus one, name."""
    numbers, _, name = line.partition(" : ")
    first, _, last = numbers.partition("-")
    return int(first, 16), int(last, 16) + 1, name


def _pages(area: tuple[int, int, str]) -> tuple[int, int]:
    """First page and number of pages."""
    return area[0] // PAGE, -(-area[1] // PAGE) - area[0] // PAGE


def _sites(memory: Any, code: tuple[int, int, str], symbols: dict[str, int]) -> list[tuple[int, int]]:
    """Entries of the jump table (struct jump_entry: where, where to, key; all relative to themselves) in the text."""
    if "_text" not in symbols:
        return []
    shift = symbols["_text"] - code[0]
    first, last = (symbols[f"__{end}___jump_table"] - shift for end in ("start", "stop"))
    raw = memory[first:last].tobytes()
    sites = []
    for at, (where, target, _) in zip(range(first, last, _ENTRY.size), _ENTRY.iter_unpack(raw), strict=True):
        if code[0] <= at + where < code[1]:
            sites.append((at + where, at + 4 + target))
    return sorted(sites)


class IntegrityCheck:
    """Compares machines with their template's fixed pages and condition."""

    def __init__(self, pages: Fixed) -> None:
        import numpy as np

        ranges = np.frombuffer(pages.ranges, "<u4").reshape(-1, 3).astype(np.int64)
        text = np.array([[*pages.text, -1]], np.int64) if pages.text[1] else np.zeros((0, 3), np.int64)
        areas = np.concatenate([ranges, text])
        areas = areas[np.argsort(areas[:, 0])]
        ends = areas[:, 0] + areas[:, 1]
        self._names = pages.names
        self._condition = pages.condition
        self._sites = np.frombuffer(pages.sites, "<i8").reshape(-1, 2)
        self._owner = np.full(int(ends.max()), -2, np.int32)
        for first, count, name in areas:
            self._owner[first : first + count] = name
        cuts = np.flatnonzero(areas[1:, 0] - ends[:-1] > _NEAR) + 1
        parts = np.split(areas, cuts)
        self._spans = [(int(part[0, 0]), int(part[-1, 0] + part[-1, 1] - part[0, 0])) for part in parts]

    def differences(self, answer: dict[str, Any], since: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Names of the entries in which a machine's condition differs from its template's. since: entries as they were
        when the machine got its image, before any program of it ran."""
        expected = self._condition | dict(since or {})
        names = expected.keys() | answer.keys()
        return tuple(sorted(name for name in names if expected.get(name) != answer.get(name)))[:SHOWN]

    def check(self, pid: int, low: int, memory: int) -> tuple[str, ...]:
        """Names of changed files, and `KERNEL`. pid: the machine's process; low: address at which it maps its memory;
        memory: a descriptor of the template's memory. VmhostError when the process has ended."""
        try:
            written = self._written(pid, low)
            tampered = {self._names[owner] for page, owner in written if owner >= 0}
            patched = [page for page, owner in written if owner == -1]
            # Twice: the kernel may be switching a branch at this moment.
            if patched and not any(self._only_switched_branches(pid, low, memory, patched) for _ in range(2)):
                tampered.add(KERNEL)
        except OSError as error:
            raise VmhostError(f"the machine's memory cannot be read: {error.strerror}") from None
        return tuple(sorted(tampered))[:SHOWN]

    def _written(self, pid: int, low: int) -> list[tuple[int, int]]:
        """Fixed pages that the machine has written: (page, index of the owner)."""
        import numpy as np

        written: list[tuple[int, int]] = []
        table = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        try:
            for first, count in self._spans:
                raw = os.pread(table, 8 * count, (low // PAGE + first) * 8)
                if len(raw) != 8 * count:
                    raise OSError(3, "No such process")
                # The highest byte of an entry: present, swapped, backed by a file.
                kind = np.frombuffer(raw, np.uint8)[7::8] & 0xE0
                pages = first + np.flatnonzero((kind == 0x80) | (kind & 0x40 != 0))
                if len(pages):
                    owners = self._owner[pages]
                    fixed_pages = owners > -2
                    written += zip(pages[fixed_pages].tolist(), owners[fixed_pages].tolist(), strict=True)
        finally:
            os.close(table)
        return written

    def _only_switched_branches(self, pid: int, low: int, memory: int, pages: list[int]) -> bool:
        """Whether these pages of the kernel's text differ from the template's only in accepted forms of branches."""
        import numpy as np

        now = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        try:
            for page in pages:
                mine, theirs = (os.pread(fd, PAGE, at + page * PAGE) for fd, at in ((now, low), (memory, 0)))
                differ = np.flatnonzero(np.frombuffer(mine, np.uint8) != np.frombuffer(theirs, np.uint8))
                places = page * PAGE + differ
                owners = np.searchsorted(self._sites[:, 0], places, "right") - 1
                for owner in np.unique(owners).tolist():
                    at, target = (-PAGE, 0) if owner < 0 else self._sites[owner].tolist()
                    last = int(places[owners == owner].max())
                    if last >= at + 5 or os.pread(now, 5, low + at) not in _forms(os.pread(memory, 5, at), target - at):
                        return False
        finally:
            os.close(now)
        return True


def _forms(was: bytes, distance: int) -> tuple[bytes, ...]:
    """The accepted forms of a branch's five bytes: taken, not taken, and each with a breakpoint first while it is being
    switched (text_poke_bp). A short branch has two bytes, and the others stay."""
    if was[:1] == b"\xe9" or was == _NO_OPS[5]:
        jump, plain = b"\xe9" + struct.pack("<i", distance - 5), _NO_OPS[5]
    elif was[:1] == b"\xeb" or was[:2] == _NO_OPS[2]:
        jump, plain = b"\xeb" + ((distance - 2) & 0xFF).to_bytes(), _NO_OPS[2]
    else:
        return ()
    rest = was[len(plain) :]
    return tuple(form + rest for form in (jump, plain, b"\xcc" + jump[1:], b"\xcc" + plain[1:]))


@lru_cache(16)
def load(path: Path, stamp: tuple[int, ...]) -> IntegrityCheck:
    """The check of a template, from its ``fixed`` file; `stamp` identifies the file's state. VmhostError."""
    try:
        return IntegrityCheck(msgspec.msgpack.decode(path.read_bytes(), type=Fixed))
    except (OSError, msgspec.DecodeError) as error:
        raise VmhostError(f"{path} cannot be read: {error}; build the template again") from None
