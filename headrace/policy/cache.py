"""Paged KV cache and the addressing of one cached forward.

Idea: keys and values are stored in blocks of 64 positions, the unit of the exact attention loop, of prefix sharing and
of eviction. A sequence is a list of block numbers; the caller decides which sequence owns a block.

Layout: per layer keys and values [blocks, V, 64, D]. Blocks start as zeros and always hold finite numbers, because a
masked position is multiplied by 0 and 0 times NaN is NaN.

On a CPU the operating system supplies a page of zeros when a block is first written. So an engine maps all blocks that
it may ever use at its start: a cache that grew by copying would stop every request for the time of the copy.
Trade-off: the memory of a block that was used once is not returned.
"""

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.block_attention import BLOCK, Paging
from headrace.policy.config import PolicyConfig


class KVCache:
    """Keys and values of all layers. `blocks` says how many there are; memory is used by those that were written."""

    shared = True

    def __init__(self, config: PolicyConfig, blocks: int = 0, device: torch.device | str = "cpu") -> None:
        self._shape = (config.kv_heads, BLOCK, config.head_dim)
        self._dtype, self._device = config.torch_dtype, device
        self.blocks = 0
        self.keys: list[Tensor] = [self._zeros(0) for _ in range(config.layers)]
        self.values: list[Tensor] = [self._zeros(0) for _ in range(config.layers)]
        self.reserve(blocks)

    def _zeros(self, blocks: int) -> Tensor:
        shape = (blocks, *self._shape)
        count = math.prod(shape)
        if not count or torch.device(self._device).type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return torch.frombuffer(mmap.mmap(-1, count * self._dtype.itemsize, flags=flags), dtype=self._dtype).view(shape)

    def reserve(self, blocks: int) -> None:
        """Grow to at least that many blocks, by a copy; the present ones keep their content. OSError: no address space
        is left."""
        if blocks > self.blocks:
            self.keys = [self._grown(old, blocks) for old in self.keys]
            self.values = [self._grown(old, blocks) for old in self.values]
            self.blocks = blocks

    def _grown(self, old: Tensor, blocks: int) -> Tensor:
        new = self._zeros(blocks)
        new[: len(old)] = old
        return new

    def forget(self, block: int) -> None:
        """Nothing: the memory of a block stays for the next sequence."""

    @property
    def block_bytes(self) -> int:
        """Memory of a block's keys and values in all layers."""
        return 2 * len(self.keys) * math.prod(self._shape) * self._dtype.itemsize


class Context(NamedTuple):
    """The keys of a cached forward in ordinary mode; made by its first layer, used by all."""

    rows: Tensor
    """int64 [B * V * blocks]: rows of the pool seen as [blocks * V, 64, D]."""
    mask: Tensor
    """[B, T * G, R] in the dtype of queries: minus infinity for those of the last R keys that a query does not see,
    otherwise 0; all queries see the keys before them."""


class Step:
    """The positions of the new tokens of one cached forward: sequence b has lengths[b] of them from starts[b] on.

    tables[b] must hold the blocks of all positions up to and including the new ones.
    """

    def __init__(
        self, lengths: Sequence[int], starts: Sequence[int], tables: Sequence[Sequence[int]], cache: KVCache
    ) -> None:
        device = cache.keys[0].device
        needed = [(start + length + BLOCK - 1) // BLOCK for start, length in zip(starts, lengths, strict=True)]
        width = max(needed)
        self.table = torch.tensor(
            [[*table[:need], *([0] * (width - need))] for table, need in zip(tables, needed, strict=True)],
            device=device,
        )
        """[B, blocks]; block 0 stands where a sequence is shorter, and is masked."""
        self.lengths, self.starts = list(lengths), list(starts)
        self.batch, self.steps = len(lengths), max(lengths)
        self.pages: Paging | None = None
        """Paging of exact mode: the first layer makes it, all layers use it."""
        self.context: Context | None = None
        """Keys of ordinary mode: the first layer makes them, all layers use them."""
        first = torch.tensor(starts, device=device)
        self.dense: Tensor | None = None
        if self.steps == min(lengths):
            self.grid = first[:, None] + torch.arange(self.steps, device=device)
            self.positions = self.grid.reshape(-1)
            owner = None
        else:
            size = torch.tensor(lengths, device=device)
            owner = torch.arange(self.batch, device=device).repeat_interleave(size, output_size=sum(lengths))
            within = torch.arange(len(owner), device=device) - (size.cumsum(0) - size).index_select(0, owner)
            self.positions = first.index_select(0, owner) + within
            self.dense = owner * self.steps + within
            """[N] place of each packed token in [B * steps]; None when the batch is rectangular."""
            self.grid = first[:, None].repeat(1, self.steps).view(-1).index_copy(0, self.dense, self.positions)
            self.grid = self.grid.view(self.batch, self.steps)
        block = self.positions.div(BLOCK, rounding_mode="floor")
        rows = torch.arange(self.batch, device=device).repeat_interleave(self.steps) if owner is None else owner
        number = self.table[rows, block]
        heads = cache.keys[0].shape[1]
        base = (number[:, None] * heads + torch.arange(heads, device=device)) * BLOCK
        self.places = (base + (self.positions - block * BLOCK)[:, None]).reshape(-1)
        """[N * V] rows of the flattened [blocks * V * 64, D] where the new keys and values go."""

    def spread(self, x: Tensor) -> Tensor:
        """Packed [N, H, D] -> [B, steps, H, D], zeros where a sequence brings fewer tokens."""
        if self.dense is not None:
            x = x.new_zeros(self.batch * self.steps, *x.shape[1:]).index_copy_(0, self.dense, x)
        return x.view(self.batch, self.steps, *x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""
        x = x.reshape(self.batch * self.steps, *x.shape[2:])
        return x if self.dense is None else x.index_select(0, self.dense)
