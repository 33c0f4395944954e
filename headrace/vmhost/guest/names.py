"""Paths as text in one line, which every operation takes back as a path.

A file's name is bytes without a slash and NUL. Characters that cannot be printed, bytes that are not UTF-8, and a blank
at either end of a path are escaped: ``\\n``, ``\\xff`` (a byte), ``\\u202e`` (a character). In a path with an escape a
backslash is doubled; any other path stays as it is. `raw` is the inverse of `shown` for every path. Operations take and
give paths as `shown` gives them.

The keys of a repository on the host (`Task.files`, `Trajectory.diff`) are names as they are, except that a name with
bytes that are no text, which no message can carry, is there as `shown`: `key` and `of_key` convert. A key that spells
such a byte's escape stands for the byte.
"""

import re
from typing import Any

_ESCAPE = re.compile(r"\\(?:([\\nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_LETTERS = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = {character: "\\" + letter for letter, character in _LETTERS.items()}


def shown(path: str) -> str:
    """A path of the file system as text of one line."""
    if path.isprintable() and path == path.strip(" ") and ("\\" not in path or raw(path) == path):
        return path
    ends = (len(path) - len(path.lstrip(" ")), len(path.rstrip(" ")))
    return "".join(
        _escaped(each) if not ends[0] <= at < ends[1] or each == "\\" or not each.isprintable() else each
        for at, each in enumerate(path)
    )


def _escaped(character: str) -> str:
    code = ord(character)
    if character in _WORDS:
        return _WORDS[character]
    if code < 0x80 or 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code & 0xFF:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def raw(path: str) -> str:
    """The path of the file system that `shown` gave as this text. A path without an escape is itself."""
    return _ESCAPE.sub(_character, path) if "\\" in path else path


def key(path: str) -> str:
    """The key on the host of a path from an operation's result."""
    plain = raw(path)
    return path if _lone(plain) else plain


def of_key(path: str) -> str:
    """The path for an operation from a key on the host."""
    return path if _lone(raw(path)) else shown(path)


def _lone(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)


def _character(match: re.Match[str]) -> str:
    letter, byte, short, long = match.groups()
    if letter:
        return _LETTERS[letter]
    if byte:
        code = int(byte, 16)
        return chr(code if code < 0x80 else 0xDC00 + code)
    code = int(short or long, 16)
    return chr(code) if code <= 0x10FFFF else match.group()


def received(header: dict[str, Any]) -> dict[str, Any]:
    """The header of an operation with its paths as the file system has them."""
    fields: dict[str, Any] = {}
    if "path" in header:
        fields["path"] = raw(header["path"])
    for field in ("paths", "delete"):
        if field in header:
            # The id of a test behind its file's path may spell an escape.
            fields[field] = [
                path if "::" in path and header["op"] == "run_tests" else raw(path) for path in header[field]
            ]
    if "entries" in header:
        fields["entries"] = [[raw(path), *rest] for path, *rest in header["entries"]]
    return header | fields
