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
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.weights.codecs.loops import compiled

Words = NDArray[np.uint32]

TILE = 8192
MOST_BYTES = 4 * (2**31 - TILE)
"""The largest tensor that SGLang's kernel can hash: its 32-bit indices overflow beyond."""
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88
_SECOND = (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK32
_LANES = np.array([[_SEED, 0x27D4EB2D, 15, 17], [_SECOND, 0x165667B1, 13, 19]], np.uint32)


def digest(tensor: Tensor) -> str:
    """The checksum (16 hex digits) of a tensor of any dtype and shape, as if it were on a GPU. ValueError above
    `MOST_BYTES`."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if data.size > MOST_BYTES:
        raise ValueError(f"expected a tensor of at most {MOST_BYTES} bytes, got {data.size}")
    if not data.size:
        return f"{0:016x}"
    words = np.pad(data, (0, -data.size % 4)) if data.size % 4 else data
    total = _tiles(words.view("<u4"), np.uint32(-(-data.size // 4) * 4 & _MASK32), _LANES)
    return f"{_splitmix64(int(total)):016x}"


@compiled
def _tiles(words: Words, size: np.uint32, lanes: Words) -> int:
    """The sum over all tiles, modulo 2 ** 64. size: bytes of the tensor, modulo 2 ** 32. lanes: seed, factor, turn of
    an index, and 32 minus the turn, of each of the two hashes."""
    total = np.uint64(0)
    for start in range(0, words.size, TILE):
        for lane in range(2):
            seed, factor, left, right = lanes[lane]
            tile = np.uint32(0)
            for at in range(start, min(start + TILE, words.size)):
                index = np.uint32(at)
                mixed = np.uint32(index * factor + seed) ^ np.uint32(index << left | index >> right) ^ words[at]
                mixed = np.uint32((mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B))
                mixed = np.uint32((mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35))
                tile = np.uint32(tile + (mixed ^ mixed >> np.uint32(16)))
            tile ^= size
            tile = np.uint32((tile ^ tile >> np.uint32(16)) * np.uint32(0x85EBCA6B))
            tile = np.uint32((tile ^ tile >> np.uint32(13)) * np.uint32(0xC2B2AE35))
            total += np.uint64(tile ^ tile >> np.uint32(16)) << np.uint64(32 * (1 - lane))
    return int(total)


def _splitmix64(value: int) -> int:
    """Splitmix64's finaliser."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
