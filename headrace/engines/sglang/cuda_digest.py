"""Computes on the CPU the checksum that SGLang 0.5.23 computes of a tensor on a GPU.

Source: `gpu_tensor_hash` in sglang/kernels/ops/memory/gpu_tensor_hash.py of the release 0.5.23, with its default seed
and tile; another release may have another function. A tensor without elements has the checksum 0.

Idea: the kernel reads a tensor as little-endian 32-bit words, with zero bytes behind the last one. It mixes each word
with its index by MurmurHash3's finaliser, in two ways. The sums over tiles of 8192 words are mixed with the number of
bytes, and the two 32-bit results of a tile make one 64-bit number. Splitmix64's finaliser of the sum over all tiles is
the checksum. Every step is arithmetic modulo a power of two, so numpy gets the same bits in any order.

Why in numpy: headrace must know the checksum of a verified file without the server, and also without a GPU of its own,
whose memory belongs to the server.

Layout: blocks of 16 tiles pass through two buffers, so that memory does not grow with the tensor, and each operation's
start costs less than its work. An index is its block's first index plus an offset, and the two share no bit: the terms
of the offsets are computed once, and a block adds the terms of its first index as scalars.

Trade-off: about 26 passes over the cached block, so it is slower than SHA-256 in hardware, but threads run at the same
time, because numpy releases the interpreter lock.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]

TILE = 8192
BLOCK = 16 * TILE
"""Words per block: a power of two, so that an offset and a block's first index share no bit."""
MOST_BYTES = 4 * (2**31 - TILE)
"""The largest tensor that SGLang's kernel can hash: its 32-bit indices overflow beyond."""
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88


class _Lane(NamedTuple):
    """One of the two 32-bit hashes."""

    seed: int
    factor: int
    turn: int
    """Bits by which an index is rotated."""
    products: Words
    """Offsets times the factor."""
    rotated: Words
    """Rotated offsets."""

    def first(self, index: int) -> tuple[np.uint32, np.uint32]:
        """The terms of a block's first index: one to add to the products, one to xor with the rotated offsets."""
        rotated = index << self.turn | index >> (32 - self.turn)
        return np.uint32((index * self.factor + self.seed) & _MASK32), np.uint32(rotated & _MASK32)


@cache
def _lanes() -> tuple[_Lane, _Lane]:
    offsets = np.arange(BLOCK, dtype=np.uint32)

    def lane(seed: int, factor: int, turn: int) -> _Lane:
        rotated = offsets << np.uint32(turn) | offsets >> np.uint32(32 - turn)
        return _Lane(seed, factor, turn, offsets * np.uint32(factor), rotated)

    second = (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK32
    return lane(_SEED, 0x27D4EB2D, 15), lane(second, 0x165667B1, 13)


def digest(tensor: Tensor) -> str:
    """The checksum (16 hex digits) of a tensor of any dtype and shape, as if it were on a GPU. ValueError above
    `MOST_BYTES`."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if data.size > MOST_BYTES:
        raise ValueError(f"expected a tensor of at most {MOST_BYTES} bytes, got {data.size}")
    if not data.size:
        return f"{0:016x}"
    words = -(-data.size // 4)
    size = min(BLOCK, words)
    mixed, scratch = np.empty(size, np.uint32), np.empty(size, np.uint32)
    total = 0
    for start in range(0, words, BLOCK):
        piece = data[4 * start : 4 * (start + BLOCK)]
        if piece.size % 4:
            piece = np.pad(piece, (0, -piece.size % 4))
        total += _block(piece.view("<u4"), start, 4 * words & _MASK32, mixed, scratch)
    return f"{_splitmix64(total & _MASK64):016x}"


def _block(words: Words, start: int, count: int, mixed: Words, scratch: Words) -> int:
    """The sum over the tiles of one block. count: bytes of the tensor, modulo 2 ** 32."""
    size = words.size
    mixed, scratch = mixed[:size], scratch[:size]
    halves = []
    for lane in _lanes():
        add, flip = lane.first(start)
        np.add(lane.products[:size], add, out=mixed)
        np.bitwise_xor(mixed, lane.rotated[:size], out=mixed)
        np.bitwise_xor(mixed, flip, out=mixed)
        np.bitwise_xor(mixed, words, out=mixed)
        _mix(mixed, scratch)
        whole = size // TILE * TILE
        sums = mixed[:whole].reshape(-1, TILE).sum(1, dtype=np.uint32)
        if size > whole:
            sums = np.append(sums, mixed[whole:].sum(dtype=np.uint32))
        sums ^= np.uint32(count)
        _mix(sums, np.empty_like(sums))
        halves.append(sums.astype(np.uint64))
    return int((halves[0] << np.uint64(32) | halves[1]).sum(dtype=np.uint64))


def _mix(words: Words, scratch: Words) -> None:
    """MurmurHash3's finaliser of 32 bits, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        np.right_shift(words, np.uint32(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor is not None:
            np.multiply(words, np.uint32(factor), out=words)


def _splitmix64(value: int) -> int:
    """Splitmix64's finaliser."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
