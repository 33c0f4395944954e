"""Shards of a version: groups of tensors that are encoded and fetched together, so that threads share the encoding and
a rank fetches only its own part.

The idea: a shard is a part of the tensor list that is fixed before anything is encoded. Chunks, units and streams never
cross it, so the bytes of a version depend on the number of shards and not on how many encoders made them or in which
order; a receiver that needs some tensors fetches only the chunks of their shards.

Tensors with neighbouring names stay together (a layer's experts, a rank's part), and shards have about equal bytes.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from headrace.messages.weights import TensorInfo, WeightManifest
from headrace.weights import state
from headrace.weights.state import HASH_BYTES, WeightError


def assign(tensors: Sequence[TensorInfo], count: int) -> tuple[TensorInfo, ...]:
    """The tensors, in their order, each with its shard number, 0 to count - 1. WeightError for a count below 1."""
    if count < 1:
        raise WeightError(f"expected at least one shard, got {count}")
    total, before = max(1, sum(map(state.nbytes, tensors))), 0
    out = []
    for info in tensors:
        size = state.nbytes(info)
        # A tensor's middle decides its shard; its end would move a large tensor to the next one.
        out.append(
            TensorInfo(info.name, info.dtype, info.shape, min(count - 1, (2 * before + size) * count // (2 * total)))
        )
        before += size
    return tuple(out)


def plain(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """The tensors without their shard numbers, as a snapshot file describes them."""
    return tuple(TensorInfo(info.name, info.dtype, info.shape) for info in tensors)


def holding(tensors: Iterable[TensorInfo], patterns: Sequence[str]) -> frozenset[int] | None:
    """The shards of tensors whose names match a pattern such as ``model.layers.3.*``; None (all) without patterns.

    WeightError when no tensor matches.
    """
    if not patterns:
        return None
    shards = frozenset(info.shard for info in tensors if any(fnmatchcase(info.name, pattern) for pattern in patterns))
    if not shards:
        raise WeightError(f"no published tensor matches {', '.join(patterns)}")
    return shards


def chosen(tensors: Iterable[TensorInfo], shards: frozenset[int] | None) -> tuple[TensorInfo, ...]:
    """The tensors of these shards (None: all), without their shard numbers."""
    return plain(info for info in tensors if shards is None or info.shard in shards)


def state_hash(manifest: WeightManifest, shards: frozenset[int] | None) -> str:
    """The state hash of a file that holds the tensors of these shards after this version."""
    if shards is None:
        return manifest.state_hash
    hashes, at = bytearray(), 0
    for info in manifest.tensors:
        end = at + state.block_count(info) * HASH_BYTES
        if info.shard in shards:
            hashes += manifest.block_hashes[at:end]
        at = end
    return state.root(chosen(manifest.tensors, shards), bytes(hashes))
