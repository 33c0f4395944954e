"""The identity of a set of weights: one hash over the exact bits of every tensor.

The idea: cut each tensor into blocks of at most 4 Mi elements, hash the raw bits of each block, and hash the list of
block hashes together with names, dtypes and shapes. A receiver checks each block while it decodes, can name a broken
block, and still compares a single hash with the trainer's.

Why xxh3-128 and not a cryptographic hash: it reads 33 GB/s on one core, sixteen times as fast as sha256, and it guards
against corruption. Chunks on the wire carry sha256 as well; they are a hundredth of the size.

Layout: tensors sorted by name, blocks in flat C order; a block never crosses a tensor. Bits are hashed little-endian,
as they are in memory. Nothing here needs torch, so a process that only moves weights does not import it;
`tensor_state.py` has the functions over tensors.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.messages.weights import TensorInfo

BLOCK = 4 << 20
"""Largest number of elements of a block."""
HASH_BYTES = 16

Bits = NDArray[np.unsignedinteger]
"""Flat unsigned view of a tensor's bit patterns: u1, u2 or u4 (8-byte types count as two u4 per element)."""

SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""The dtypes that can be published, in safetensors' spelling, and the bytes of an element."""
_UNSIGNED: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype(np.uint8),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u4"),
}


class WeightError(HeadraceError):
    """Weights cannot be read, or do not match their hashes or description; the text names them and the reason."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype in safetensors' spelling. WeightError when it is not one we publish."""
    try:
        return SIZES[dtype]
    except KeyError:
        raise WeightError(f"dtype {dtype!r} cannot be published; expected one of {', '.join(SIZES)}") from None


def unsigned(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The numpy dtype under which bits of this dtype are compared: u1, u2 or u4."""
    return _UNSIGNED[itemsize(dtype)]


def elements(info: TensorInfo) -> int:
    """Number of elements of a tensor."""
    count = 1
    for side in info.shape:
        count *= side
    return count


def nbytes(info: TensorInfo) -> int:
    """Bytes of a tensor."""
    return elements(info) * itemsize(info.dtype)


def blocks(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """(start, count) of each block of a tensor, counted in items of its `unsigned` view. An empty tensor has none."""
    total = nbytes(info) // unsigned(info.dtype).itemsize
    for start in range(0, total, BLOCK):
        yield start, min(BLOCK, total - start)


def block_count(info: TensorInfo) -> int:
    """Number of blocks of a tensor, computed without `blocks`, because an untrusted shape may be huge."""
    return -(-(nbytes(info) // unsigned(info.dtype).itemsize) // BLOCK)


class Part(NamedTuple):
    """A block as a part of a unit: its index in the whole state, the index of its tensor, and the items that it
    covers."""

    block: int
    tensor: int
    start: int
    items: int


def units(tensors: Sequence[TensorInfo]) -> list[tuple[Part, ...]]:
    """The runs of blocks that are coded together: of one dtype and shard, in order, with at most `BLOCK` items in
    total.

    A large block is a unit of its own; the many small tensors of a model share streams, and so the tables of the
    entropy coder.
    """
    out: list[tuple[Part, ...]] = []
    running: dict[tuple[str, int], list[Part]] = {}
    sizes: dict[tuple[str, int], int] = {}
    index = 0
    for tensor, info in enumerate(tensors):
        for start, count in blocks(info):
            kind = info.dtype, info.shard
            held = running.setdefault(kind, [])
            if held and sizes[kind] + count > BLOCK:
                out.append(tuple(held))
                held.clear()
                sizes[kind] = 0
            held.append(Part(index, tensor, start, count))
            sizes[kind] = sizes.get(kind, 0) + count
            index += 1
    out += [tuple(held) for held in running.values() if held]
    return out


def unit_hash(unit: Sequence[Part], hashes: bytes | bytearray) -> bytes:
    """The hash of a unit, 16 bytes, in a state with these block hashes."""
    return joint_hash(bytes(hashes[p.block * HASH_BYTES : (p.block + 1) * HASH_BYTES]) for p in unit)


def joint_hash(hashes: Iterable[bytes]) -> bytes:
    """The hash, 16 bytes, of blocks with these hashes."""
    return xxhash.xxh3_128_digest(b"".join(hashes))


def block_hash(part: Bits) -> bytes:
    """16 bytes: xxh3-128 of a block's bits."""
    return xxhash.xxh3_128_digest(part.data)


def block_hashes(tensors: Sequence[TensorInfo], arrays: Iterable[Bits]) -> bytes:
    """The hashes of all blocks in order, 16 bytes each."""
    out = bytearray()
    for info, array in zip(tensors, arrays, strict=True):
        for start, count in blocks(info):
            out += block_hash(array[start : start + count])
    return bytes(out)


def copied(source: Bits, into: Bits, piece_bytes: int) -> Generator[None, None, bytes]:
    """Copy a tensor's bits piece by piece and yield after each; returns the block hashes of the copy."""
    step, hashes = max(1, piece_bytes // into.itemsize), bytearray()
    for start in range(0, source.size, BLOCK):
        end, digest = min(start + BLOCK, source.size), xxhash.xxh3_128()
        for at in range(start, end, step):
            part = into[at : min(at + step, end)]
            np.copyto(part, source[at : at + part.size])
            digest.update(part.data)
            yield
        hashes += digest.digest()
    return bytes(hashes)


def root(tensors: Sequence[TensorInfo], hashes: bytes) -> str:
    """The state hash (32 hex digits) from names, dtypes, shapes and block hashes."""
    head = msgspec.msgpack.encode([(info.name, info.dtype, info.shape) for info in tensors])
    return xxhash.xxh3_128_hexdigest(len(head).to_bytes(8, "little") + head + hashes)
