"""The limits of an archive, its refusals, its members, and the paths that these may have.

An archive may be forged: a few bytes name billions of files, gigabytes of headers, a path outside the folder, or a file
and a folder of one name. Every reader counts before it unpacks and refuses in one sentence.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from headrace.errors import HeadraceError

MAX_PATH = 1024
"""Bytes of a path."""
MAX_NAME = 255
"""Bytes of one part of a path, the limit of Linux's file systems."""


class ArchiveRefused(HeadraceError):
    """The archive is not read. The text begins with 'it' or with a member's name and gives the reason."""


class ArchiveTooLarge(ArchiveRefused):
    """The archive holds more than its reader takes."""


class ArchiveLimits(NamedTuple):
    """The most that an archive may hold."""

    files: int
    size: int
    """Bytes of all files together."""

    @property
    def members(self) -> int:
        """Files, folders and links together."""
        return 4 * self.files

    @property
    def unpacked(self) -> int:
        """Bytes of a tar without its compression: the files, their padding and the members' headers."""
        return 4 * self.size

    def check(self, members: int, files: int, size: int) -> None:
        """ArchiveTooLarge when these numbers, counted so far, are above the limits."""
        if size > self.size:
            raise ArchiveTooLarge(f"it unpacks to more than {self.size >> 20} MiB")
        if files > self.files:
            raise ArchiveTooLarge(f"it holds more than {self.files} files")
        if members > self.members:
            raise ArchiveTooLarge(f"it holds more than {self.members} files and folders")


class Member(NamedTuple):
    """A file of an archive, or something else that is no folder."""

    name: str
    """As it stands in the archive: it may leave the folder."""
    data: bytes | None
    """The content of a file; None: a link, a device or a submodule."""
    kind: Literal["file", "program", "link", "submodule", "other"] = "file"
    """``program``: a file that may be executed. Archives other than commits say ``file`` or ``other``."""
    target: str = ""
    """Of a link of a commit."""


def safe_path(path: str) -> bool:
    """Whether a relative path stays inside its folder and can be a file's name in a sandbox."""
    parts = path.split("/")
    if not path or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        return False
    try:
        return len(path.encode()) <= MAX_PATH and all(len(part.encode()) <= MAX_NAME for part in parts)
    except UnicodeEncodeError:  # a name that is not UTF-8, which no message can carry
        return False


def both_file_and_folder(paths: Iterable[str]) -> str | None:
    """A path that is a file and the folder of another one, so that no sandbox can have both; None without one."""
    before = "\0"
    # With NUL as separator the files of a folder follow directly after a file of the folder's name.
    for path in sorted(path.replace("/", "\0") for path in paths):
        if path.startswith(before + "\0"):
            return before.replace("\0", "/")
        before = path
    return None


def files_of(members: Iterable[Member], *, skip_links: bool) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file. ArchiveRefused for a path that leaves the folder or is not UTF-8, and for a link
    or a device unless they are skipped."""
    for member in members:
        path = "/".join(part for part in member.name.split("/") if part not in ("", "."))
        if member.name.startswith("/") or ".." in path.split("/"):
            raise ArchiveRefused(f"{member.name[:80]!a} leaves the folder")
        if not safe_path(path):
            text = f"{member.name[:80]!a} is no file name of UTF-8 with at most {MAX_NAME} bytes, {MAX_PATH} in a path"
            raise ArchiveRefused(text)
        if member.data is not None:
            yield path, member.data
        elif not skip_links and member.kind != "submodule":
            raise ArchiveRefused(f"{member.name[:80]!a} is a link or a device; expected files and folders alone")
