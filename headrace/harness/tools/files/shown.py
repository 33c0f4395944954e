"""A file as read_file shows it, and edits of that text as edits of the file's bytes."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from headrace.harness.tools.files.matching import Change, Match, find
from headrace.vmhost.guest.lines import body, columns, near_end, parse, shown, shown_line

_ESCAPE = re.compile(r"\\(?:r|x[0-9a-f]{2}|u[0-9a-f]{4})")


class ShownFile:
    """One file. `text` is what read_file shows of it, without line numbers."""

    def __init__(self, data: bytes) -> None:
        self._file = parse(data)
        lines = [shown_line(line) for line in self._file.lines]
        self.text = "".join(lines)
        self._raw = "".join(self._file.lines)
        self._starts = list(accumulate(map(len, lines), initial=0))
        self._raw_starts = list(accumulate(map(len, self._file.lines), initial=0))

    def _line(self, offset: int) -> int:
        """The line that holds the offset; the last line also holds its end."""
        return max(0, min(bisect_right(self._starts, offset), len(self._file.lines)) - 1)

    def _raw_offset(self, offset: int) -> int:
        """The offset in the file's text for one in the shown text; -1 inside an escape."""
        if not self._file.lines:
            return 0
        number = self._line(offset)
        line, column = self._file.lines[number], offset - self._starts[number]
        if column > len(shown(line)):  # behind the line end of the last line
            return self._raw_starts[number + 1]
        at = column if len(shown(line)) == len(body(line)) else columns(line)[column]
        return at if at < 0 else self._raw_starts[number] + at

    def find(self, old: str, new: str) -> Match:
        """The places of `old`. One that begins or ends inside an escape is none."""
        match = find(self.text, old, new)
        whole = [p for p in match.places if self._raw_offset(p.start) >= 0 and self._raw_offset(p.end) >= 0]
        return match._replace(places=tuple(whole))

    def changed(self, changes: Sequence[Change]) -> bytes | None:
        """The file with these changes, in order and without overlap; None if one would write an escape anew: edit
        cannot write what it stands for."""
        pieces: list[str] = []
        at = 0
        for start, end, new in map(self._widened, changes):
            first, last = self._raw_offset(start), self._raw_offset(end)
            if self.text[start:end] != self._raw[first:last].replace("\r\n", "\n") and _ESCAPE.search(new):
                return None
            pieces += [self._raw[at:first], self._with_ends(new, first, last, self._line(start))]
            at = last
        return self._file._replace(lines=["".join([*pieces, self._raw[at:]])]).data

    def _widened(self, change: Change) -> Change:
        """The change without half escapes at its ends."""
        start, end, new = change
        while self._raw_offset(start) < 0:
            start, new = start - 1, self.text[start - 1] + new
        while self._raw_offset(end) < 0:
            end, new = end + 1, new + self.text[end]
        return Change(start, end, new)

    def _with_ends(self, new: str, first: int, last: int, line: int) -> str:
        """A replacement with the line ends of what it replaces, or of the lines around it."""
        ends = re.findall("\r?\n", self._raw[first:last]) or [near_end(self._file.lines, line)]
        *closed, rest = new.split("\n")
        if self._raw[last : last + 1] in ("", "\r", "\n"):
            rest = rest.rstrip("\r")
        lines = [text.rstrip("\r") + ends[min(at, len(ends) - 1)] for at, text in enumerate(closed)]
        return "".join([*lines, rest])
