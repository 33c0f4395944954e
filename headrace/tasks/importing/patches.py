"""The paths that a git patch names: quoted ones, renamed ones, and those of files without lines."""

import re
from collections.abc import Iterator

SUBMODULE = re.compile(r"^(?:new file|deleted file|new|old) mode 160000$|^index \S+ 160000$", re.MULTILINE)
_SECTION = re.compile(r"^diff --git ", re.MULTILINE)
_NAMES = ("rename from ", "rename to ", "copy from ", "copy to ")
_SIDES = ("--- ", "+++ ")
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def paths_of(patch: str) -> tuple[str, ...]:
    """The paths that a patch names, old and new ones."""
    sections = _SECTION.split(patch)[1:]
    return tuple(dict.fromkeys(path for section in sections for path in _of_section(section)))


def _of_section(section: str) -> Iterator[str]:
    """The paths of one file's part of a patch, which begins behind ``diff --git``."""
    header, *rest = section.split("\n")
    named = False
    for line in rest:
        if line.startswith(("@@ ", "GIT binary patch")):
            break
        for start in _NAMES:
            if line.startswith(start):
                named = True
                yield _unquoted(line.removeprefix(start))
        if line.startswith(_SIDES):
            path = _unquoted(line[4:].partition("\t")[0] if not line[4:].startswith('"') else line[4:])
            if path != "/dev/null":
                named = True
                yield _without_prefix(path)
    if not named:  # only a mode, an empty file or a binary one: both names are equal
        yield _without_prefix(_first(header.rstrip("\r")))


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
