"""The artifacts of an attempt for a verifier with an image of its own: archives out of one sandbox for another.

An archive holds regular files, folders and links that stay inside of their artifact. A link that leaves it would name a
file of the verifier's image, such as the expected answer; where the artifact itself is such a link, the file that it
names in the attempt's sandbox takes its place.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from errno import ENOENT
from fnmatch import fnmatchcase
from posixpath import basename, dirname

from headrace.errors import HeadraceError
from headrace.messages.sandbox import PullTar, PushTar, ReadFile, Sandbox
from headrace.messages.tasks import Artifact

LARGEST = 32 << 20
"""Bytes of one artifact."""


class NotCollected(HeadraceError):
    """An artifact is too large or cannot be read: the candidate's own doing; one sentence says which."""


async def collect(sandbox: Sandbox, artifacts: Sequence[Artifact]) -> tuple[PushTar, ...]:
    """Operations that make the artifacts in a sandbox, whose workspace is the root, as it is of `sandbox`. An artifact
    that does not exist is left out. NotCollected, SandboxLost."""
    archives = []
    for artifact in artifacts:
        path = artifact.path.strip("/")
        read = await sandbox.call(ReadFile(path=path, limit=0))
        if read.error.endswith(os.strerror(ENOENT)):
            continue
        pulled = await sandbox.call(PullTar(path=path, limit=LARGEST))
        if not pulled.ok:
            raise NotCollected(f"the artifact {pulled.error}")
        members = _members(pulled.data, artifact)
        if read.ok and not (members and members[0][0].isreg()):
            members = [await _named(sandbox, path)]
        where = dirname(path) if read.ok else path
        archives.append(PushTar(data=_archive(members), path=where or ".", forced=True))
    return tuple(archives)


async def _named(sandbox: Sandbox, path: str) -> "Member":
    """The file that a link names."""
    read = await sandbox.call(ReadFile(path=path, limit=LARGEST))
    if not read.ok or read.truncated:
        raise NotCollected(f"the artifact {read.error or f'{path}: more than {LARGEST >> 20} MiB'}")
    entry = tarfile.TarInfo(basename(path))
    entry.size = len(read.data)
    return entry, read.data


Member = tuple[tarfile.TarInfo, bytes]
"""An entry of an archive and its content."""


def _members(data: bytes, artifact: Artifact) -> list[Member]:
    """The entries of an artifact's archive that a verifier gets. NotCollected."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            return list(_entries(archive, artifact))
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise NotCollected(f"the artifact {artifact.path} is an unreadable archive: {error}") from None


def _entries(archive: tarfile.TarFile, artifact: Artifact) -> Iterator[Member]:
    for entry in archive:
        if excluded(entry.name, artifact.exclude):
            continue
        if entry.isreg() or entry.islnk():
            file = archive.extractfile(entry)
            content = file.read() if file is not None else b""
            plain = tarfile.TarInfo(entry.name)
            plain.mode, plain.mtime, plain.size = entry.mode, entry.mtime, len(content)
            yield plain, content
        elif entry.isdir() or (entry.issym() and _inside(entry)):
            yield entry, b""


def _inside(link: tarfile.TarInfo) -> bool:
    """Whether a link's target lies in the archive's folder, whatever other links it passes."""
    segments = [segment for segment in link.linkname.split("/") if segment not in ("", ".")]
    up = next((index for index, segment in enumerate(segments) if segment != ".."), len(segments))
    absolute = link.linkname.startswith("/")
    return not absolute and ".." not in segments[up:] and up <= link.name.count("/")


def excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether ``tar --exclude`` leaves out a path: a pattern matches it or a folder above it, from any segment on."""
    parts = path.split("/")
    ends = range(1, len(parts) + 1)
    names = ["/".join(parts[start:end]) for end in ends for start in range(end)]
    return any(fnmatchcase(name, pattern.removeprefix("./")) for pattern in patterns for name in names)


def _archive(members: Sequence[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, content in members:
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()
