"""Ownership of KV blocks: sessions, and prefixes that sessions share.

Idea: the unit is the block of 64 positions that exact attention walks anyway. A full block is indexed under a hash of
its tokens, of everything before it, and of the weights that wrote it; a new session whose context starts alike takes
the same blocks. Because keys name the weights, a swap needs no flush: old prefixes are not found any more.

Beside keys and values a block's record keeps what the trainer needs of its positions (routed experts), so reuse loses
nothing. A shared block is never written again: only a session's last, partial block is, and that one is always its own.

Trade-off: reuse across sessions is whole blocks only; within a session it is exact to the position.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

from headrace.kernels.block_attention import BLOCK
from headrace.messages.rollout import Span
from headrace.policy.cache import KVCache


class Session:
    """The state of one segment in the engine: the positions that have keys and values, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy = False
        self.used = 0
        """Tick of last use, for eviction."""
        self.clear()

    def clear(self) -> None:
        """Forget everything forwarded; the blocks must have been released."""
        self.ids: list[int] = []
        """Tokens at positions 0..n-1 that were forwarded."""
        self.blocks: list[int] = []
        self.routed = bytearray()
        self.spans: list[Span] = []
        self.calls: list[int] = []
        """Context lengths, sampled tokens included, at which finished calls ended: what has been reported so far."""
        self.pure: bytes | None = None
        """Key of the weights that wrote every position; None when there is none or several."""
        self.chain: list[bytes] = []
        """Key of each full block, as long as all before it is pure."""

    def note(self, ids: Sequence[int], version: int, weights: bytes, routed: bytes) -> None:
        """Positions were forwarded by `version`."""
        start = len(self.ids)
        if not start:
            self.pure = weights
        elif self.pure != weights:
            self.pure = None
        self.ids.extend(ids)
        self.routed += routed
        end = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(self.spans[-1].start, end, version)
        else:
            self.spans.append(Span(start, end, version))

    def cut(self, length: int, row: int) -> None:
        """Forget positions from `length` on; the store releases the blocks. row: bytes of routes per position."""
        del self.ids[length:]
        del self.routed[length * row :]
        self.spans = [Span(s.start, min(s.end, length), s.version) for s in self.spans if s.start < length]
        del self.chain[length // BLOCK :]

    def report_from(self, context: Sequence[int]) -> int:
        """First position that a call with this context has to report: all that no earlier, still valid call did."""
        while self.calls and (self.calls[-1] > len(context) or self.calls[-1] - 1 > len(self.ids)):
            self.calls.pop()
        return self.calls[-1] - 1 if self.calls else 0


class Prefix:
    """One indexed block."""

    __slots__ = ("block", "routed", "version", "weights")

    def __init__(self, block: int, version: int, weights: bytes, routed: bytes) -> None:
        self.block, self.version, self.weights, self.routed = block, version, weights, routed


def chain_key(weights: bytes, parent: bytes, ids: Sequence[int]) -> bytes:
    """Key of a full block: its tokens, all before them, and the weights that wrote them."""
    return hashlib.blake2b(array("i", ids).tobytes(), key=weights[:64], salt=parent[:16], digest_size=16).digest()


class BlockStore:
    """Blocks by reference count; a block with no reference and no index entry is free."""

    def __init__(self, cache: KVCache, limit: int) -> None:
        """limit: blocks at most; the pool grows up to it by doubling."""
        self.cache, self.limit = cache, limit
        self.free = list(range(cache.blocks - 1, -1, -1))
        self.references: dict[int, int] = {}
        self._indexed: set[int] = set()
        self._idle = 0  # indexed blocks that no session holds
        self.index: OrderedDict[bytes, Prefix] = OrderedDict()
        """Least recently used first."""

    @property
    def available(self) -> int:
        """Blocks that can be had without taking any from a session."""
        return len(self.free) + (self.limit - self.cache.blocks) + self._idle

    def take(self) -> int:
        """A block to write to. IndexError when there is none: callers reserve before they start."""
        if not self.free and self.cache.blocks < self.limit:
            old = self.cache.blocks
            self.cache.reserve(min(self.limit, max(16, 2 * old)))
            self.free = list(range(self.cache.blocks - 1, old - 1, -1))
        if not self.free:
            self._evict()
        block = self.free.pop()
        self.references[block] = 1
        return block

    def release(self, blocks: Collection[int]) -> None:
        """Give references back."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 1 and block in self._indexed:
                self._idle += 1
            elif not self.references[block]:
                del self.references[block]
                self.free.append(block)

    def _hold(self, block: int) -> None:
        if self.references[block] == 1 and block in self._indexed:
            self._idle -= 1
        self.references[block] += 1

    def _forget(self, key: bytes) -> None:
        block = self.index.pop(key).block
        if self.references[block] == 1:
            self._idle -= 1
        self._indexed.discard(block)
        self.release((block,))

    def _evict(self) -> None:
        """Drop the index entry that was not used for longest and that no session holds."""
        for key, prefix in self.index.items():
            if self.references[prefix.block] == 1:
                return self._forget(key)

    def keep_only(self, weights: Collection[bytes]) -> None:
        """Drop prefixes written by weights that are not served any more."""
        for key in [key for key, prefix in self.index.items() if prefix.weights not in weights]:
            self._forget(key)

    def offer(self, session: Session, version: int, weights: bytes, row: int) -> None:
        """Index the session's blocks that became full, where one set of weights wrote all before them."""
        if session.pure is None:
            return
        while len(session.chain) < len(session.ids) // BLOCK:
            at = len(session.chain) * BLOCK
            parent = session.chain[-1] if session.chain else b""
            key = chain_key(weights, parent, session.ids[at : at + BLOCK])
            session.chain.append(key)
            if key not in self.index:
                block = session.blocks[at // BLOCK]
                self._hold(block)
                self._indexed.add(block)
                routed = bytes(session.routed[at * row : (at + BLOCK) * row])
                self.index[key] = Prefix(block, version, weights, routed)

    def adopt(self, session: Session, context: Sequence[int], weights: bytes) -> None:
        """Give a fresh session the indexed blocks with which its context starts; its last position is never among
        them, since it must be forwarded to sample from."""
        parent = b""
        for at in range(0, (len(context) - 1) // BLOCK * BLOCK, BLOCK):
            ids = context[at : at + BLOCK]
            key = chain_key(weights, parent, ids)
            prefix = self.index.get(key)
            if prefix is None:
                return
            self.index.move_to_end(key)
            self._hold(prefix.block)
            session.blocks.append(prefix.block)
            session.note(ids, prefix.version, weights, prefix.routed)
            session.chain.append(key)
            parent = key

    def trim(self, session: Session, length: int, row: int) -> None:
        """Cut a session back to `length` positions, or to the last whole block before it where the block that would be
        written next is shared."""
        if length >= len(session.ids):
            return
        if length % BLOCK and self.references[session.blocks[length // BLOCK]] > 1:
            length -= length % BLOCK
        session.cut(length, row)
        keep = (length + BLOCK - 1) // BLOCK
        self.release(session.blocks[keep:])
        del session.blocks[keep:]
        if not length:
            session.clear()

    def drop(self, session: Session) -> None:
        """Take all blocks from a session; it starts anew at its next call."""
        self.release(session.blocks)
        session.clear()
