"""Tar files, plain or compressed by gzip, bzip2 or xz, read once from front to back.

tarfile trusts an archive: it reads a header of any size into memory, follows chains of headers by recursion, goes back
where a size is negative and takes a damaged header for the end. So it reads through `_Plain`, which counts.
"""

import bz2
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, Member

_PIECE = 1 << 16
_HEADERS = 1 << 18
"""Bytes of all headers of one member: names, times, extended attributes."""
_XZ_MEMORY = 128 << 20
DAMAGED = (
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
)
"""Errors that the standard library's readers of archives raise for damaged and forged ones."""


class Entry(NamedTuple):
    """A member of a tar, with all that its headers say."""

    info: tarfile.TarInfo
    content: IO[bytes] | None
    """Of a file; read it before the next entry. Its reads raise `DAMAGED`."""


def members(source: IO[bytes], limits: ArchiveLimits) -> Iterator[Member]:
    """The members of a tar, without its folders. ArchiveRefused, ArchiveTooLarge."""
    try:
        for info, content in entries(source, limits):
            if not info.isdir():
                yield Member(info.name, content.read()) if content else Member(info.name, None, "other")
    except DAMAGED as error:
        raise ArchiveRefused(f"it is no tar file, or a damaged one: {str(error)[:200]}") from None


def entries(source: IO[bytes], limits: ArchiveLimits, *, packed: bool = True) -> Iterator[Entry]:
    """All members of a tar, read to the source's end. packed: decompress it where it is compressed. ArchiveRefused,
    ArchiveTooLarge."""
    plain = _Plain(source, limits, packed)
    number = files = size = 0
    try:
        with plain.headers():
            archive = tarfile.open(fileobj=cast(IO[bytes], plain), mode="r:", encoding="utf-8")
        while member := _next(archive, plain):
            if member.size < 0 or member.issparse():
                raise ArchiveRefused(f"{member.name[:80]!a} is a sparse file or has a negative size")
            number, files = number + 1, files + member.isfile()
            size += member.size if member.isfile() else 0
            limits.check(number, files, size)
            yield Entry(member, archive.extractfile(member) if member.isfile() else None)
        plain.finish()
    except DAMAGED as error:
        raise ArchiveRefused(f"it is no tar file, or a damaged one: {str(error)[:200]}") from None


def _next(archive: tarfile.TarFile, plain: "_Plain") -> tarfile.TarInfo | None:
    with plain.headers():
        member = archive.next()
    cast(Any, archive).members.clear()  # it keeps every member otherwise
    if member is None and plain.last.strip(b"\0"):
        raise ValueError("a header is damaged")
    return member


class _Plain:
    """The bytes of a tar without its compression, as a file that is read forward."""

    def __init__(self, source: IO[bytes], limits: ArchiveLimits, packed: bool) -> None:
        self._pieces = _decompressed(source) if packed else iter(lambda: source.read(_PIECE), b"")
        self._limits = limits
        self._ahead = bytearray()
        self._at = 0
        self._budget: int | None = None
        self.last = b""
        """The bytes that were read last."""

    @contextmanager
    def headers(self) -> Iterator[None]:
        """A context: the reads inside it are those of one member's headers."""
        self._budget = _HEADERS
        yield
        self._budget = None

    def tell(self) -> int:
        return self._at

    def seek(self, to: int) -> int:
        if to < self._at:
            raise ValueError("a size is negative")
        while self._at < to and self._take(min(to - self._at, _PIECE)):
            pass
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise ValueError("a size is negative")
        if self._budget is not None:
            self._budget -= size
            if self._budget < 0:
                raise ArchiveTooLarge(f"it has a member with more than {_HEADERS >> 10} KiB of headers")
        self.last = self._take(size)
        return self.last

    def finish(self) -> None:
        """Read to the end: only there does a compressed stream show that it is whole."""
        while self._take(_PIECE):
            pass

    def _take(self, size: int) -> bytes:
        while len(self._ahead) < size and (piece := next(self._pieces, b"")):
            self._ahead += piece
        taken = bytes(self._ahead[:size])
        del self._ahead[:size]
        self._at += len(taken)
        if self._at > self._limits.unpacked:
            raise ArchiveTooLarge(f"it unpacks to more than {self._limits.unpacked >> 20} MiB, headers included")
        return taken


def _decompressed(source: IO[bytes]) -> Iterator[bytes]:
    """Pieces of at most `_PIECE` bytes. ValueError, EOFError, OSError, zlib.error, lzma.LZMAError."""
    packed = source.read(_PIECE)
    decoder = _decoder(packed)
    while decoder is None and packed:
        yield packed
        packed = source.read(_PIECE)
    while decoder is not None:
        piece: bytes = decoder.decompress(packed, _PIECE)
        if piece:
            yield piece
        if decoder.eof:
            packed = decoder.unused_data
            # Several streams in a row are one file, and zeros may fill it up.
            while not (packed := packed.lstrip(b"\0")) and (packed := source.read(_PIECE)):
                pass
            if not packed:
                return
            packed += source.read(6)
            if (decoder := _decoder(packed)) is None:
                raise ValueError("other data follows the compressed data")
            continue
        packed = getattr(decoder, "unconsumed_tail", b"")
        if not packed and getattr(decoder, "needs_input", True):
            packed = source.read(_PIECE)
            if not packed and not piece:
                raise EOFError("the compressed data is cut off")


def _decoder(packed: bytes) -> Any:
    if packed.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31)
    if packed.startswith(b"BZh"):
        return bz2.BZ2Decompressor()
    if packed.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
    return None


def packed(folder: Path) -> bytes:
    """A folder's content as a tar: with modes and links, without owners and times. OSError."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name, filter=plain)
    return out.getvalue()
