"""Zip files. Their directory says how much they hold, so that it is counted before anything is unpacked."""

import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple, cast

from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, Member
from headrace.archives.tars import DAMAGED

_PIECE = 1 << 20


class Found(NamedTuple):
    """A file of a zip that is too large to be read at once."""

    name: str
    size: int
    pieces: Iterator[bytes]
    """Raises ArchiveRefused where the content is damaged."""


def only(source: IO[bytes], suffix: str, limits: ArchiveLimits) -> Found:
    """The only file whose name ends with the suffix. ArchiveRefused, also when there is another number of them."""
    with _opened(source, limits) as (_, files):
        matching = [info for info in files if info.filename.endswith(suffix)]
    if len(matching) != 1:
        raise ArchiveRefused(f"it contains {len(matching)} {suffix} files, expected 1")
    return Found(matching[0].filename, matching[0].file_size, _pieces(source, matching[0], limits))


def _pieces(source: IO[bytes], info: zipfile.ZipInfo, limits: ArchiveLimits) -> Iterator[bytes]:
    with _opened(source, limits) as (archive, _), archive.open(info) as inside:
        left = info.file_size
        while left and (piece := inside.read(_PIECE)):
            left -= len(piece)
            yield piece
        if left or inside.read(1):
            raise ValueError(f"{info.filename[:80]!a} has not the {info.file_size} bytes that the directory says")


def members(source: IO[bytes], limits: ArchiveLimits) -> Iterator[Member]:
    """The members of a zip, without its folders. ArchiveRefused, ArchiveTooLarge."""
    with _opened(source, limits) as (archive, files):
        for info in files:
            mode = info.external_attr >> 16
            if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                yield Member(info.filename, None, "other")
                continue
            data = archive.read(info)
            if len(data) != info.file_size:
                raise ValueError(f"{info.filename[:80]!a} has {len(data)} bytes, not {info.file_size}")
            yield Member(info.filename, data)


@contextmanager
def _opened(source: IO[bytes], limits: ArchiveLimits) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
    """The zip and its files, counted. ArchiveRefused, also for what the reads inside raise."""
    counted = _Counted(source, (1 << 20) + 512 * limits.members)
    try:
        with zipfile.ZipFile(cast(IO[bytes], counted)) as archive:
            counted.budget = None
            infos = archive.infolist()
            files = [info for info in infos if not info.is_dir()]
            limits.check(len(infos), len(files), sum(info.file_size for info in files))
            yield archive, files
    except (zipfile.BadZipFile, *DAMAGED) as error:
        raise ArchiveRefused(f"it is no zip file, or a damaged one: {str(error)[:200]}") from None


class _Counted:
    """A file of which at most `budget` bytes are read: zipfile takes the whole directory into memory at once."""

    def __init__(self, source: IO[bytes], budget: int) -> None:
        self._source = source
        self.budget: int | None = budget
        self.seekable = source.seekable  # zipfile asks for it

    def read(self, size: int = -1) -> bytes:
        if self.budget is not None:
            data = self._source.read(min(size, self.budget + 1) if size >= 0 else self.budget + 1)
            self.budget -= len(data)
            if self.budget < 0:
                raise ArchiveTooLarge("its directory alone is larger than that of all files that it may hold")
            return data
        return self._source.read(size)

    def seek(self, to: int, whence: int = 0) -> int:
        return self._source.seek(to, whence)

    def tell(self) -> int:
        return self._source.tell()

    def close(self) -> None:
        """The caller closes its file."""
