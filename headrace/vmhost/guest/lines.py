"""The lines of a file. Every part that shows, finds or edits lines takes them from here, on the host and in the guest.

A line ends with ``\\n``, and a ``\\r`` directly before it belongs to the line end. Nothing else separates lines: a form
feed, U+0085, U+2028 or a lone ``\\r`` is text. A byte-order mark at the start of a file is in no line. Bytes outside
the replaced lines never change; a new line gets the line end of the line whose place it takes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""The marks at the start of a UTF-16 file."""
_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (UTF16[0], "utf-16-le"), (UTF16[1], "utf-16-be"))
_HIDDEN = re.compile("[\r\0\ud800-\udfff]")


class NoSuchLines(ValueError):
    """The file does not have these lines; the text says how many it has."""


class Text(NamedTuple):
    """A file as text. `data` gives back its exact bytes."""

    mark: bytes
    """Its byte-order mark."""
    codec: str
    lines: list[str]
    """Each with its line end; the last may have none. Bytes that are not of the encoding are lone surrogates."""
    rest: bytes = b""
    """The half of a character that a UTF-16 file ends with."""

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.mark + "".join(self.lines).encode(self.codec, _errors(self.codec)) + self.rest


def _errors(codec: str) -> str:
    return "surrogateescape" if codec == "utf-8" else "surrogatepass"


def parse(data: bytes) -> Text:
    """A file's bytes as text: UTF-16 if it has that mark, otherwise UTF-8."""
    mark, codec = next((each for each in _MARKS if data.startswith(each[0])), (b"", "utf-8"))
    end = len(data) - (len(data) % 2 if codec != "utf-8" else 0)
    return Text(mark, codec, split(data[len(mark) : end].decode(codec, _errors(codec))), data[end:])


def split(text: str) -> list[str]:
    """The lines of a text, each with its line end."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def body(line: str) -> str:
    """A line without its line end."""
    return line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")


def bodies(data: bytes) -> list[str]:
    """The lines of a file without their line ends."""
    return [body(line) for line in parse(data).lines]


def shown(line: str) -> str:
    """A line as a policy reads it, without its line end: a lone carriage return, a NUL and a byte that is no text are
    escaped, such as ``\\r`` and ``\\xff``."""
    line = body(line)
    return _HIDDEN.sub(_escaped, line) if _HIDDEN.search(line) else line


def shown_line(line: str) -> str:
    """`shown` with a line feed if the line has an end."""
    return shown(line) + ("\n" if line.endswith("\n") else "")


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == 13:
        return "\\r"
    return f"\\x{code & 0xFF:02x}" if code < 0xD800 or 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def shown_lines(data: bytes) -> list[str]:
    """The lines of a file as a policy reads them."""
    return [shown(line) for line in parse(data).lines]


def columns(line: str) -> list[int]:
    """For each character of ``shown(line)``, and for its end: the column in the line, or -1 inside an escape."""
    at: list[int] = []
    for column, character in enumerate(body(line)):
        at += [column] + [-1] * (len(_HIDDEN.sub(_escaped, character)) - 1)
    return [*at, len(body(line))]


def written(text: str) -> list[str]:
    """The lines of a text that a policy wrote, without line ends. Those of the file take their place, so a carriage
    return at the end of a line is dropped. The text of no lines is empty, that of an empty line is a line end."""
    return [line.rstrip("\r\n") for line in split(text)]


def joined(lines: Sequence[str]) -> str:
    """A text of which `written` gives these lines."""
    return "\n".join(lines) + ("\n" if lines and not lines[-1] else "")


def with_ends(new: Sequence[str], old: Sequence[str], near: str) -> list[str]:
    """New lines with the ends of the old ones that they replace: each takes the end at its place, the last one that of
    the last, where an empty line needs one. near: the end of lines that replace none, or one without an end."""
    ends = [line[len(body(line)) :] for line in old] or [near]
    placed = [line + (ends[min(at, len(ends) - 1)] or near) for at, line in enumerate(new[:-1])]
    return [*placed, *(line + (ends[-1] or ("" if line else near)) for line in new[-1:])]


def near_end(lines: Sequence[str], at: int) -> str:
    """The line end that is usual at line `at`, 0-based: that of the line itself or the nearest before, else behind."""
    for line in (*lines[at::-1], *lines[at + 1 :]):
        if line.endswith("\n"):
            return line[len(body(line)) :]
    return "\n"


def replaced(data: bytes, first: int, last: int, text: str) -> bytes:
    """The file with its lines first..last, 1-based and inclusive, replaced by `text`; last = first - 1 inserts before
    first. A file keeps its final line end, or stays without one. NoSuchLines."""
    file = parse(data)
    lines = file.lines
    if not 1 <= first <= len(lines) + 1 or not first - 1 <= last <= len(lines):
        raise NoSuchLines(f"has {len(lines)} lines; lines {first} to {last} cannot be replaced")
    near = near_end(lines, max(0, min(first, len(lines)) - 1))
    new, old = written(text), lines[first - 1 : last]
    if new and first > len(lines) and lines and not lines[-1].endswith("\n"):
        # The file's last line becomes one before the last. Behind a carriage return a line feed alone would change it.
        old, new = lines[-1:], [lines[-1], *new]
        near = "\r\n" if lines[-1].endswith("\r") else near
        return file._replace(lines=[*lines[:-1], *with_ends(new, old, near)]).data
    return file._replace(lines=[*lines[: first - 1], *with_ends(new, old, near), *lines[last:]]).data
