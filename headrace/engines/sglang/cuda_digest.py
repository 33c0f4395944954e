"""Computes on the CPU the checksum that SGLang 0.5.23 computes of a tensor on a GPU.

Source: `gpu_tensor_hash` in sglang/kernels/ops/memory/gpu_tensor_hash.py of the release 0.5.23, with its default seed
and tile; another release may have another function. A tensor without elements has the checksum 0.

Idea: the kernel reads a tensor as little-endian 32-bit words, with zero bytes behind the last one. It mixes each word
with its index by MurmurHash3's finaliser, in two ways. The sums over tiles of 8192 words are mixed with the number of
bytes, and the two 32-bit results of a tile make one 64-bit number. Splitmix64's finaliser of the sum over all tiles is
the checksum. Every step is arithmetic modulo a power of two, so numpy gets the same bits in any order.

Why here: headrace must know the checksum of a verified file without the server, and also without a GPU of its own,
whose memory belongs to the server. The loop releases the interpreter's lock.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.weights import tensor_state
from headrace.weights.codecs.loops import compiled

Words = NDArray[np.uint32]

TILE = 8192
MOST_BYTES = 4 * (2**31 - TILE)
"""The largest tensor that SGLang's kernel can hash: its 32-bit indices overflow beyond."""
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88
_SECOND = (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK32


def digest(*parts: Tensor) -> str:
    """The checksum (16 hex digits) of a tensor, as if it were on a GPU: of the bytes of its parts, one behind the
    other. ValueError above `MOST_BYTES`."""
    pieces = [tensor_state.bits(part).view(np.uint8) for part in parts]
    size = sum(piece.size for piece in pieces)
    if size > MOST_BYTES:
        raise ValueError(f"expected a tensor of at most {MOST_BYTES} bytes, got {size}")
    if not size:
        return f"{0:016x}"
    if any(piece.size % 4 for piece in pieces):
        pieces = [np.concatenate([*pieces, np.zeros(-size % 4, np.uint8)])]
    total, first, tile, padded = 0, 0, np.zeros(2, np.uint32), -(-size // 4)
    for piece in pieces:
        words = piece.view("<u4")
        total += _tiles(words, first, padded, np.uint32(padded * 4 & _MASK32), tile)
        first += words.size
    return f"{_splitmix64(total & _MASK64):016x}"


@compiled
def _tiles(words: Words, first: int, end: int, size: np.uint32, tile: Words) -> int:
    """The sum over the tiles that end in these words, modulo 2 ** 64. first: index of the first word. end: number of
    words of the tensor. size: its bytes, modulo 2 ** 32. tile: the two sums of the tile that the words before began.

    The seeds, factors and turns are constants, not arguments: the compiler then makes vector code of the loop, which
    takes a third of the time (0.20 and 0.59 s a GiB).
    """
    total, at = np.uint64(0), 0
    while at < words.size:
        begun = first + at
        part = words[at : min(words.size, at + TILE - begun % TILE)]
        at += part.size
        left, right, base = tile[0], tile[1], np.uint32(begun)
        for offset in range(part.size):
            index, word = np.uint32(base + np.uint32(offset)), part[offset]
            turned = np.uint32(index << np.uint32(15) | index >> np.uint32(17))
            mixed = np.uint32(index * np.uint32(0x27D4EB2D) + np.uint32(_SEED)) ^ turned ^ word
            mixed = np.uint32((mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B))
            mixed = np.uint32((mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35))
            left = np.uint32(left + (mixed ^ mixed >> np.uint32(16)))
            turned = np.uint32(index << np.uint32(13) | index >> np.uint32(19))
            mixed = np.uint32(index * np.uint32(0x165667B1) + np.uint32(_SECOND)) ^ turned ^ word
            mixed = np.uint32((mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B))
            mixed = np.uint32((mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35))
            right = np.uint32(right + (mixed ^ mixed >> np.uint32(16)))
        tile[0], tile[1] = left, right
        if (first + at) % TILE == 0 or first + at == end:
            for lane in range(2):
                mixed = np.uint32(tile[lane] ^ size)
                mixed = np.uint32((mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B))
                mixed = np.uint32((mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35))
                total += np.uint64(mixed ^ mixed >> np.uint32(16)) << np.uint64(32 * (1 - lane))
                tile[lane] = 0
    return int(total)


def _splitmix64(value: int) -> int:
    """Splitmix64's finaliser."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
