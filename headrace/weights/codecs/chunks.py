"""Packs frames into chunks of at most 900 KiB, so that a chunk's message stays below the bus's limit of 1 MiB.

Layout: a chunk holds whole frames, each after its 4-byte little-endian length. So a chunk can be checked, decoded and
fetched again without any other.
"""

from collections.abc import Iterator

from headrace.weights.codecs.codec import Frame, from_bytes
from headrace.weights.state import WeightError

LIMIT = 900 << 10
"""Largest number of bytes of a chunk."""


class Packer:
    """Collects frames into chunks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes) -> bytes | None:
        """Add a frame. Returns the collected chunk when the frame no longer fits into it. WeightError when it fits no
        chunk."""
        need = 4 + len(frame)
        if need > LIMIT:
            raise WeightError(f"a frame of {len(frame)} bytes does not fit a chunk of {LIMIT}")
        full = self.flush() if self._size + need > LIMIT else None
        self._parts += [len(frame).to_bytes(4, "little"), frame]
        self._size += need
        return full

    def flush(self) -> bytes | None:
        """The collected frames as a chunk; None when there are none."""
        chunk = b"".join(self._parts) if self._parts else None
        self._parts, self._size = [], 0
        return chunk


def frames(chunk: bytes) -> Iterator[Frame]:
    """The frames of a chunk. WeightError when it ends inside a frame."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        end = at + 4 + int.from_bytes(view[at : at + 4], "little")
        if end > len(chunk) or end < at + 5:
            raise WeightError(f"a chunk of {len(chunk)} bytes ends inside a frame")
        yield from_bytes(bytes(view[at + 4 : end]))
        at = end
