"""Reads the paths that a git patch names: quoted paths, both paths of a rename, and paths of files without lines."""

import re
from typing import NamedTuple

SUBMODULE = re.compile(r"^(?:new file|deleted file|new|old) mode 160000$|^index \S+ 160000$", re.MULTILINE)
_SECTION = re.compile(r"^diff --git ", re.MULTILINE)
_OLD, _NEW = ("--- ", "rename from ", "copy from "), ("+++ ", "rename to ", "copy to ")
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


class Named(NamedTuple):
    """The names of one file in a patch."""

    old: str
    """Empty for a new file."""
    new: str
    """Empty for a deleted one."""


def names_of(patch: str) -> tuple[Named, ...]:
    """The files that a patch names, in its order."""
    return tuple(map(_of_section, _SECTION.split(patch)[1:]))


def paths_of(patch: str) -> tuple[str, ...]:
    """The paths that a patch names, old and new ones."""
    return tuple(dict.fromkeys(path for names in names_of(patch) for path in names if path))


def _of_section(section: str) -> Named:
    """The names in one file's part of a patch, which begins behind ``diff --git``. A part without them is about a mode,
    an empty file or a binary one, and both names of its header are equal."""
    header, *rest = section.split("\n")
    equal = _without_prefix(_first(header.rstrip("\r")))
    old = new = ""
    for line in rest:
        if line.startswith(("@@ ", "GIT binary patch")):
            break
        old = _name(line, _OLD) or old
        new = _name(line, _NEW) or new
    old, new = old or equal, new or equal
    if re.search(r"^new file mode ", section, re.MULTILINE) or old == "/dev/null":
        old = ""
    if re.search(r"^deleted file mode ", section, re.MULTILINE) or new == "/dev/null":
        new = ""
    return Named(old, new)


def _name(line: str, starts: tuple[str, ...]) -> str:
    """The name in a line of a part's head; empty in another line."""
    start = next((start for start in starts if line.startswith(start)), "")
    if start not in ("--- ", "+++ "):
        return _unquoted(line.removeprefix(start)) if start else ""
    text = line.removeprefix(start)
    path = _unquoted(text if text.startswith('"') else text.partition("\t")[0])
    return path if path == "/dev/null" else _without_prefix(path)


def _first(header: str) -> str:
    """The first of the two equal names of a header, with its prefix."""
    if header.startswith('"'):
        return _unquoted(header)
    return header[: len(header) // 2]


def _without_prefix(path: str) -> str:
    """The path without ``a/`` or ``b/``, or what a git of other settings writes there."""
    return path.partition("/")[2]


def _unquoted(text: str) -> str:
    """A name that git may have put into quotes."""
    text = text.rstrip("\r")
    if not text.startswith('"'):
        return text
    inner = re.match(r'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    data = (inner[1] if inner else text[1:]).encode("utf-8", "surrogateescape")

    def byte(match: "re.Match[bytes]") -> bytes:
        if match[1]:
            return bytes([int(match[1], 8) & 0xFF])
        return _LETTERS.get(match[2], match[2])

    return _ESCAPE.sub(byte, data).decode("utf-8", "surrogateescape")
