"""Finds text that a task's solution adds in the task's files: in other files, byte code, archives or git.

A short text occurs twice by chance, so a block counts from `_LINES` code lines on, and counts as leaked where a file
holds half of its windows of that many lines.
"""

import io
import re
import zlib
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import PurePosixPath

from headrace.archives import tars, zips
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge
from headrace.vmhost.guest.lines import bodies

_LINES, _CHARACTERS = 3, 60
"""Size of a window: code lines, and the characters that they have at least."""
_LIMITS = ArchiveLimits(100_000, 64 << 20)
"""Of one archive."""
_COMPILED = (".pyc", ".pyo", ".so", ".pyd")


def added(before: bytes, after: bytes) -> list[str]:
    """The blocks of lines that are in `after` and not in `before`."""
    old, new = (bodies(data) for data in (before, after))
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return ["\n".join(new[a:b]) for kind, _, _, a, b in blocks if kind != "equal" and b > a]


def remains(files: Mapping[str, bytes], texts: list[str], names: tuple[str, ...] = ()) -> Iterator[str]:
    """A sentence for each file with parts of these texts. names: of functions and classes; compiled files that hold one
    of them count as the deleted code."""
    wanted = set[str]()
    for text in texts:
        wanted |= _windows(text)
    for path, content in sorted(files.items()):
        if path.endswith(_COMPILED) and any(name.encode() in content for name in names):
            yield f"{path} is compiled code that names {', '.join(n for n in names if n.encode() in content)}"
        try:
            for inside, data in _contents(path, content) if wanted else ():
                if 2 * len(wanted & _windows(data.decode("utf-8", "replace"))) >= len(wanted):
                    yield f"{inside} holds lines that the solution adds"
                    break
        except ArchiveTooLarge as error:
            yield f"{path} may hold the solution and is not searched: {error}"


def _windows(text: str) -> set[str]:
    """Every run of `_LINES` code lines, without their spaces, comments and brackets alone."""
    lines = [re.sub(r"\s+", "", line.partition("#")[0]) for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 2]
    runs = ("\n".join(lines[at : at + _LINES]) for at in range(len(lines) - _LINES + 1))
    return {run for run in runs if len(run) >= _CHARACTERS}


def _contents(path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """The file, and what it holds when it is an archive or an object of git. ArchiveTooLarge."""
    yield path, content
    try:
        if ".git" in PurePosixPath(path).parts and content[:1] == b"\x78":
            yield path, zlib.decompressobj().decompress(content, _LIMITS.size)
        elif content[:4] == b"PK\x03\x04":
            for member in zips.members(io.BytesIO(content), _LIMITS):
                yield f"{path}:{member.name}", member.data or b""
        elif path.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
            for member in tars.members(io.BytesIO(content), _LIMITS):
                yield f"{path}:{member.name}", member.data or b""
    except ArchiveTooLarge:
        raise
    except (zlib.error, ArchiveRefused):
        return  # its content does not match its name, so it cannot be read and leaks nothing
