"""Pieces of an object: chunks that follow each other in it and are read at once."""

from collections.abc import Iterator, Sequence

from headrace.messages.weights import ChunkInfo

PIECE_BYTES = 8 << 20
"""Most bytes of a piece."""


def pieces(chunks: Sequence[ChunkInfo], shards: frozenset[int] | None = None) -> Iterator[list[ChunkInfo]]:
    """The chunks of these shards (None: all) in runs that follow each other in the object, of at most `PIECE_BYTES`."""
    piece: list[ChunkInfo] = []
    size = 0
    for info in chunks:
        wanted = shards is None or info.shard in shards
        if piece and (not wanted or size + info.bytes > PIECE_BYTES):
            yield piece
            piece, size = [], 0
        if wanted:
            piece.append(info)
            size += info.bytes
    if piece:
        yield piece
