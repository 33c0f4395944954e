"""Ownership of KV-cache blocks: sessions, and prefixes that several sessions use.

Idea: the unit is the block of 64 positions of exact attention. A full block is indexed under a hash of its tokens, of
all tokens before it, and of the weights that wrote it; a new session with the same start of its context uses the same
blocks. Because keys name the weights, a swap needs no flush: new lookups do not match old prefixes.

Besides keys and values a block's record has the routed experts of its positions, so the trainer gets them for reused
blocks too. Shared blocks are never written: a session writes only its last, partial block, which no other session uses.

Trade-off: sessions share whole blocks only; within a session reuse is exact to the position.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from headrace.kernels.block_attention import BLOCK
from headrace.messages.rollout import Span
from headrace.policy.seam import Cache


class Session:
    """The state of one segment in the engine: the positions that have keys and values, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy = False
        self.clear()

    def clear(self) -> None:
        """Remove all positions; the caller has released the blocks."""
        self.ids: list[int] = []
        """The forwarded tokens, at positions 0..n-1."""
        self.blocks: list[int] = []
        self.routed = bytearray()
        self.spans: list[Span] = []
        self.calls: list[int] = []
        """Context lengths, sampled tokens included, at the end of finished calls; earlier calls reported the positions
        before them."""
        self.pure: bytes | None = None
        """Key of the weights that wrote all positions; None without positions, or when several versions wrote them."""
        self.chain: list[bytes] = []
        """Key of each full block, as far as one version wrote all positions."""

    def note(self, ids: Sequence[int], version: int, weights: bytes, routed: bytes) -> None:
        """Record that `version` forwarded these tokens. weights: key of the weights; routed: bytes of their routes."""
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
        """Remove the positions from `length` on; the store releases the blocks. row: bytes of routes per position."""
        del self.ids[length:]
        del self.routed[length * row :]
        self.spans = [Span(s.start, min(s.end, length), s.version) for s in self.spans if s.start < length]
        del self.chain[length // BLOCK :]

    def report_from(self, context: Sequence[int]) -> int:
        """First position that a call with this context must report; valid earlier calls reported the ones before it."""
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


def route_bytes(recorder: Sequence[Tensor], dtype: str) -> bytes:
    """Routes of one forward pass, int64 [N, top_k] per sparse layer, as bytes: [N, sparse layers, top_k] in C order, in
    the config's `routed_dtype`."""
    if not recorder:
        return b""
    stacked = torch.stack(list(recorder), 1)
    small = stacked.to(torch.uint8 if dtype == "|u1" else torch.int16)  # experts fit 15 bits
    return small.contiguous().cpu().numpy().tobytes()


class BlockStore:
    """Blocks with reference counts; an index entry is a reference too. A block without references is free."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.free = list(range(cache.blocks - 1, -1, -1))
        self._written = 0
        """Number of blocks that were ever taken; the lowest are taken first."""
        self.references: dict[int, int] = {}
        self.index: dict[bytes, Prefix] = {}
        self._indexed: dict[int, bytes] = {}  # the key of each indexed block
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Indexed blocks that no session holds, the longest idle first."""

    @property
    def available(self) -> int:
        """Number of blocks that `take` can return without evicting a session."""
        return len(self.free) + len(self._idle)

    @property
    def used_bytes(self) -> int:
        """Memory of the blocks that were ever taken."""
        return self._written * self.cache.block_bytes

    def take(self) -> int:
        """A block to write to. IndexError when there is none; callers check `available` first."""
        if not self.free:
            self._evict()
        block = self.free.pop()
        self._written = max(self._written, block + 1)
        self.references[block] = 1
        return block

    def release(self, blocks: Collection[int]) -> None:
        """Remove one reference of each block."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 1 and block in self._indexed:
                self._idle[block] = None
            elif not self.references[block]:
                del self.references[block]
                self.free.append(block)
                self.cache.forget(block)

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self.references[block] += 1

    def _forget(self, key: bytes) -> None:
        block = self.index.pop(key).block
        self._idle.pop(block, None)
        del self._indexed[block]
        self.release((block,))

    def _evict(self) -> None:
        """Remove the index entry that no session has held for the longest time."""
        if self._idle:
            self._forget(self._indexed[next(iter(self._idle))])

    def keep_only(self, weights: Collection[bytes]) -> None:
        """Remove the prefixes that other weights than these wrote. weights: keys."""
        for key in [key for key, prefix in self.index.items() if prefix.weights not in weights]:
            self._forget(key)

    def offer(self, session: Session, version: int, weights: bytes, row: int) -> None:
        """Index the session's new full blocks, if one version wrote all its positions. row: bytes of routes per
        position."""
        if session.pure is None or not self.cache.shared:
            return
        while len(session.chain) < len(session.ids) // BLOCK:
            at = len(session.chain) * BLOCK
            parent = session.chain[-1] if session.chain else b""
            key = chain_key(weights, parent, session.ids[at : at + BLOCK])
            session.chain.append(key)
            if key not in self.index:
                block = session.blocks[at // BLOCK]
                self._hold(block)
                self._indexed[block] = key
                routed = bytes(session.routed[at * row : (at + BLOCK) * row])
                self.index[key] = Prefix(block, version, weights, routed)

    def adopt(self, session: Session, context: Sequence[int], weights: bytes) -> None:
        """Give a new session the indexed blocks that match the start of its context. The context's last position is
        never among them, because it must be forwarded to sample the next token."""
        parent = b""
        for at in range(0, (len(context) - 1) // BLOCK * BLOCK, BLOCK):
            ids = context[at : at + BLOCK]
            key = chain_key(weights, parent, ids)
            prefix = self.index.get(key)
            if prefix is None:
                return
            self._hold(prefix.block)
            session.blocks.append(prefix.block)
            session.note(ids, prefix.version, weights, prefix.routed)
            session.chain.append(key)
            parent = key

    def trim(self, session: Session, length: int, row: int) -> None:
        """Cut a session to `length` positions. Where the block at `length` is shared, cut to the end of the whole
        blocks before it, because shared blocks are not written; to nothing where the cache cannot be cut."""
        if length >= len(session.ids):
            return
        if not self.cache.shared:
            length = 0
        if length % BLOCK and self.references[session.blocks[length // BLOCK]] > 1:
            length -= length % BLOCK
        session.cut(length, row)
        keep = (length + BLOCK - 1) // BLOCK
        self.release(session.blocks[keep:])
        del session.blocks[keep:]
        if not length:
            session.clear()

    def drop(self, session: Session) -> None:
        """Release all blocks of a session; its next call forwards the whole context."""
        self.release(session.blocks)
        session.clear()
