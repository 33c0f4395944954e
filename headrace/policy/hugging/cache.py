"""Caches of sequences in transformers' own form.

The idea: what a layer remembers may be keys and values, a window of them or a recurrent state, and only the library
knows which. So a sequence has one cache of the library, found by the first of the blocks that its caller has reserved
for it. Blocks only count memory here: sequences share none, and one that was cut is forwarded from its start again.
"""

from typing import Any, NamedTuple

from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig


class Held(NamedTuple):
    """A sequence's forwarded tokens and the library's cache of them."""

    ids: list[int]
    past: Any


class Sequences:
    """The caches of all sequences of an engine, or of one that is scored."""

    shared = False

    def __init__(self, config: PolicyConfig, blocks: int) -> None:
        self.blocks = blocks
        self.held: dict[int, Held] = {}
        """By the first block of the sequence."""
        self._block_bytes = KVCache(config).block_bytes

    @property
    def block_bytes(self) -> int:
        """Memory of 64 positions, where every layer keeps its keys and values."""
        return self._block_bytes

    def forget(self, block: int) -> None:
        """Free the sequence that begins with a block, if one does."""
        self.held.pop(block, None)
