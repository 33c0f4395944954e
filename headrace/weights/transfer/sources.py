"""The places from which the bytes of a snapshot file come: a file that this machine can open, or a node over HTTP.

A source is not trusted: what it says about its file only decides which bytes are read, and every block is hashed
(`incoming`).
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.messages.weights import TensorInfo
from headrace.weights import snapshot, state
from headrace.weights.state import WeightError
from headrace.weights.transfer.incoming import Piece

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECT_S = 5.0
QUIET_S = 15.0
"""Seconds without a byte after which a node counts as dead."""
PIECE_S = 120.0
"""Longest time in seconds for one piece: a node that sends slowly must not hold the last one."""


class SourceFailed(Exception):
    """A source did not give the bytes; the text names it and the reason."""


class Source(Protocol):
    """One file at one place."""

    @property
    def name(self) -> str:
        """For events."""

    async def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`. SourceFailed when they are not all there."""


class LocalFile:
    """A file that this machine can open."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    async def read(self, start: int, end: int) -> bytes:
        """As `Source`."""
        return await asyncio.to_thread(self._read, start, end)

    def _read(self, start: int, end: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), end - start, start)
                while data and len(data) < end - start:
                    more = os.pread(file.fileno(), end - start - len(data), start + len(data))
                    if not more:
                        break
                    data += more
        except OSError as error:
            raise SourceFailed(f"{self.path} cannot be read: {error.strerror}") from None
        if len(data) < end - start:
            raise SourceFailed(f"{self.path} ends before byte {end}: it was truncated")
        return data


class RemoteFile:
    """A file that another node serves (`serving`)."""

    def __init__(self, session: "ClientSession", node: str, url: str, token: str) -> None:
        """url: of the file. token: the secret that nodes share."""
        self.name = f"node {node}"
        self._session, self._url, self._headers = session, url, {"Authorization": f"Bearer {token}"}

    async def read(self, start: int, end: int) -> bytes:
        """As `Source`."""
        import aiohttp

        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}"}
        try:
            # A node sends nobody elsewhere: a redirect is another answer than 206.
            got = self._session.get(self._url, headers=headers, allow_redirects=False)
            async with asyncio.timeout(PIECE_S), got as answer:
                if answer.status == 401:
                    raise SourceFailed(
                        f"{self.name} refuses this node's secret: give both the weight_peers.key of one run"
                    )
                if answer.status != 206:
                    raise SourceFailed(f"{self.name} answers {answer.status} for {self._url}")
                data = await answer.content.readexactly(end - start)
        except (asyncio.IncompleteReadError, aiohttp.ClientPayloadError):
            raise SourceFailed(f"{self.name} sent less than the {end - start} bytes of the range") from None
        except TimeoutError:
            raise SourceFailed(f"{self.name} was too slow") from None
        except (aiohttp.ClientError, OSError) as error:
            raise SourceFailed(f"{self.name} cannot be reached: {error}") from None
        return data


class Layout:
    """Where the tensors lie in a source's file, as the file itself says."""

    def __init__(self, offsets: Mapping[str, int], tensors: Sequence[TensorInfo], name: str) -> None:
        """offsets: name of a tensor to its offset in the file. tensors: of the version."""
        self._offsets, self._tensors, self._name = offsets, tensors, name

    def span(self, piece: Piece) -> tuple[int, int]:
        """The first byte of a piece and the byte after its last. SourceFailed when its blocks do not follow each other
        in this file."""
        begin = at = -1
        for part in piece.parts:
            info = self._tensors[part.tensor]
            width = state.unsigned(info.dtype).itemsize
            start = self._offsets[info.name] + part.start * width
            if begin < 0:
                begin = at = start
            if start != at:
                raise SourceFailed(f"{self._name} has the tensors in another order")
            at += part.items * width
        return begin, at


async def layout_of(source: Source, tensors: Sequence[TensorInfo], wanted: frozenset[str]) -> Layout:
    """Read a file's header. SourceFailed when the file does not hold the tensors named `wanted` as the version has
    them."""
    try:
        length = snapshot.header_length(await source.read(0, 8), source.name)
        tensors_there, offsets, _ = snapshot.parse_header(await source.read(8, 8 + length), source.name, 1 << 62)
    except WeightError as error:
        raise SourceFailed(str(error)) from None
    here = {info.name: (info.dtype, info.shape) for info in tensors_there}
    for info in tensors:
        if info.name in wanted and here.get(info.name) != (info.dtype, info.shape):
            raise SourceFailed(f"{source.name} does not hold {info.name} as the version has it")
    return Layout(offsets, tensors, source.name)
