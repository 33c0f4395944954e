"""Was a machine touched where nothing honest writes? The host looks at its memory; the guest takes no part.

A digest that the guest makes is blind to what its maker is blind to, and worth as much as the guest. But the kernel of
the host knows which pages a clone has written (`/proc/PID/pagemap`: present, and not of a file any more), and a
template knows which of its pages must never be written: the root lies in memory, so the page cache is every file of it,
and the kernel's text and read-only data lie in one place (guest/pages.py finds them once, when a template is made). A
look is the intersection of the two. Whoever takes over the guest's kernel can write any page; not without its becoming
the clone's own. That a page was written is enough: putting it back does not help.

One thing honest changes the kernel's text: branches that are switched at run time (Documentation/staging/static-keys,
here those of packet time stamps and socket filters, and many more could). Where they are stands in the kernel's own
jump table, in its read-only memory: at such a place the two forms of that branch are right, and nothing else.

Not seen: memory that honest work writes too (heaps and stacks of running processes, the kernel's data, its modules).
What root could do with that without such a page, `differences` finds in the answer of the machine's first process.
"""

import os
import struct
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.vmhost.errors import VmhostError

PAGE = 4096
KERNEL = "kernel"
SHOWN = 8
"""Names in the answer of a look."""
_AGENT = "/opt/headrace/guest/"
_4_GIB = 1 << 20
"""In pages."""
_NEAR = 64
"""Pages between two ranges that are read along rather than left out."""
_NO_OPS = {5: bytes.fromhex("0f1f440000"), 2: bytes.fromhex("6690")}
_ENTRY = struct.Struct("<iiq")


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of a template that nothing honest writes, and where honest code changes the kernel's text."""

    names: tuple[str, ...]
    """Whose they are: paths of files, `KERNEL` first."""
    ranges: bytes
    """First page, number of pages, index of the name: little-endian u32, in order of pages."""
    text: tuple[int, int]
    """First page of the kernel's text, and number of pages; none of it is in `ranges`."""
    sites: bytes
    """Switched branches: offset in memory and offset of their target, little-endian i64, ascending."""
    condition: dict[str, str]
    """What the first process says of all that only root could change (guest/condition.py)."""


class _Report(msgspec.Struct):
    files: list[tuple[str, list[int]]]
    memory: list[str]
    symbols: dict[str, int]


Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Survey = tuple[dict[str, Any], dict[str, Any]]


async def survey(ask: Ask) -> Survey:
    """What a template that is about to be frozen has to say: its fixed pages, and its condition."""
    return await ask({"op": "pages"}), await ask({"op": "condition"})


def write(folder: Path, surveyed: Survey) -> None:
    """``fixed`` beside the memory of a template. VmhostError when the survey and the memory do not fit."""
    (folder / "fixed").write_bytes(msgspec.msgpack.encode(fixed(*surveyed, folder / "ram")))


def fixed(pages: dict[str, Any], condition: dict[str, Any], ram: Path) -> Fixed:
    """The survey in terms of the memory file. VmhostError when the agent's own files are not where it says."""
    try:
        report = msgspec.convert(pages, _Report)
        memory = np.memmap(ram, np.uint8, "r")
        areas = [_area(line) for line in report.memory]
        # What does not fit below the devices lies above 4 GiB, and last in the file.
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
        raise VmhostError(f"the template's memory can't be told apart: {error or type(error).__name__}") from None
    return Fixed(
        names=tuple(names),
        ranges=table.tobytes(),
        text=_pages(code) if sites else (0, 0),
        sites=np.array(sites, "<i8").tobytes(),
        condition={name: str(text) for name, text in condition.items()},
    )


def _check(memory: Any, names: list[str], table: Any) -> None:
    """ValueError when the agent is not where it should be: then nothing else is."""
    if int((table[:, 0].astype(np.int64) + table[:, 1]).max()) * PAGE > len(memory):
        raise ValueError("a page beyond its end")
    begins = {names[name]: int(first) * PAGE for first, _, name in table[::-1]}
    for path in (Path(__file__).parent / "guest").glob("*.py"):
        at, known = begins.get(f"{_AGENT}{path.name}"), path.read_bytes()[:PAGE]
        if at is not None and memory[at : at + len(known)].tobytes() != known:
            raise ValueError(f"{path.name} is not where it should be")


def _area(line: str) -> tuple[int, int, str]:
    """First byte, last plus one, name."""
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
    found = []
    for at, (where, target, _) in zip(range(first, last, _ENTRY.size), _ENTRY.iter_unpack(raw), strict=True):
        if code[0] <= at + where < code[1]:
            found.append((at + where, at + 4 + target))
    return sorted(found)


class Watch:
    """A template's fixed pages, ready to be looked at."""

    def __init__(self, pages: Fixed) -> None:
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

    def differences(self, answer: dict[str, Any]) -> tuple[str, ...]:
        """Names under which a machine's condition is another than its template's."""
        names = self._condition.keys() | answer.keys()
        return tuple(sorted(name for name in names if self._condition.get(name) != answer.get(name)))[:SHOWN]

    def look(self, pid: int, low: int, memory: int) -> tuple[str, ...]:
        """What of a machine was touched: paths, `KERNEL`. low: where its process maps its memory; memory: a descriptor
        of the template's. VmhostError when the process is gone."""
        try:
            written = self._written(pid, low)
            touched = {self._names[owner] for page, owner in written if owner >= 0}
            patched = [page for page, owner in written if owner == -1]
            # Twice: a branch that is being switched at this moment has been by then.
            if patched and not any(self._right(pid, low, memory, patched) for _ in range(2)):
                touched.add(KERNEL)
        except OSError as error:
            raise VmhostError(f"the machine's memory can't be looked at: {error.strerror}") from None
        return tuple(sorted(touched))[:SHOWN]

    def _written(self, pid: int, low: int) -> list[tuple[int, int]]:
        """Fixed pages that the machine has written, and whose they are."""
        found: list[tuple[int, int]] = []
        table = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        try:
            for first, count in self._spans:
                raw = os.pread(table, 8 * count, (low // PAGE + first) * 8)
                if len(raw) != 8 * count:
                    raise OSError(3, "No such process")
                # The uppermost byte: present, swapped, of a file.
                kind = np.frombuffer(raw, np.uint8)[7::8] & 0xE0
                pages = first + np.flatnonzero((kind == 0x80) | (kind & 0x40 != 0))
                if len(pages):
                    owners = self._owner[pages]
                    mine = owners > -2
                    found += zip(pages[mine].tolist(), owners[mine].tolist(), strict=True)
        finally:
            os.close(table)
        return found

    def _right(self, pid: int, low: int, memory: int, pages: list[int]) -> bool:
        """Whether pages of the kernel's text differ from the template's in branches alone, each in one of its forms."""
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
    """The five bytes of a branch as they may be: taken or not; and, while it is switched, with a breakpoint first
    (text_poke_bp). Short ones are two bytes, and the rest stays."""
    if was[:1] == b"\xe9" or was == _NO_OPS[5]:
        jump, plain = b"\xe9" + struct.pack("<i", distance - 5), _NO_OPS[5]
    elif was[:1] == b"\xeb" or was[:2] == _NO_OPS[2]:
        jump, plain = b"\xeb" + ((distance - 2) & 0xFF).to_bytes(), _NO_OPS[2]
    else:
        return ()
    rest = was[len(plain) :]
    return tuple(form + rest for form in (jump, plain, b"\xcc" + jump[1:], b"\xcc" + plain[1:]))


@lru_cache(16)
def watch(path: Path, stamp: tuple[int, ...]) -> Watch:
    """A template's, from its file; `stamp` tells one state of it from another. VmhostError when it can't be read."""
    try:
        return Watch(msgspec.msgpack.decode(path.read_bytes(), type=Fixed))
    except (OSError, msgspec.DecodeError) as error:
        raise VmhostError(f"{path} can't be read: {error}; build the template again") from None
