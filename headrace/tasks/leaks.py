"""Finds text that a task's solution adds in the task's files: in other files, byte code, archives or git.

A short text occurs twice by chance, so a block counts from `_LINES` code lines on, and counts as leaked where a file
holds half of its windows of that many lines.
"""

import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import PurePosixPath

_LINES, _CHARACTERS = 3, 60
"""Size of a window: code lines, and the characters that they have at least."""
_LARGEST = 64 << 20
"""Bytes that are unpacked of one file."""
_COMPILED = (".pyc", ".pyo", ".so", ".pyd")


def added(before: bytes, after: bytes) -> list[str]:
    """The blocks of lines that are in `after` and not in `before`."""
    old, new = (data.decode("utf-8", "replace").splitlines() for data in (before, after))
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
        for inside, data in _contents(path, content):
            if wanted and 2 * len(wanted & _windows(data.decode("utf-8", "replace"))) >= len(wanted):
                yield f"{inside} holds lines that the solution adds"
                break


def _windows(text: str) -> set[str]:
    """Every run of `_LINES` code lines, without their spaces, comments and brackets alone."""
    lines = [re.sub(r"\s+", "", line.partition("#")[0]) for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 2]
    runs = ("\n".join(lines[at : at + _LINES]) for at in range(len(lines) - _LINES + 1))
    return {run for run in runs if len(run) >= _CHARACTERS}


def _contents(path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """The file, and what it holds when it is an archive or an object of git."""
    yield path, content
    try:
        if ".git" in PurePosixPath(path).parts and content[:1] == b"\x78":
            yield path, zlib.decompressobj().decompress(content, _LARGEST)
        elif content[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(content)) as packed:
                for info in packed.infolist():
                    if info.file_size <= _LARGEST:
                        yield f"{path}:{info.filename}", packed.read(info)
        elif path.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.isfile() and member.size <= _LARGEST else None
                    if file is not None:
                        yield f"{path}:{member.name}", file.read()
    except (zlib.error, zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, RuntimeError):
        return  # its content does not match its name, so it cannot be read and leaks nothing
