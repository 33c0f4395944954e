"""Filters the head records of a run: a valid one is signed by a known publisher and follows the last valid one.

The idea: a head names the sequence of the head that it was written after. A forged record has no valid signature; a
genuine one that was stored a second time follows a head that is no longer the last. Every reader of the stream applies
this rule, so sender, receivers and auditors agree on the newest version.
"""

from collections.abc import AsyncIterator
from typing import Any

from headrace.messages import subjects
from headrace.messages.weights import WeightHead
from headrace.weights import chain, signing
from headrace.weights.signing import Trust, Untrusted
from headrace.weights.state import WeightError


class Heads:
    """The valid head records of a run. `take` gets the records in stream order."""

    def __init__(self, run: str, trust: Trust | None):
        """trust: the publishers whose heads are valid; None accepts all."""
        self.run, self._trust = run, trust
        self.newest: WeightHead | None = None
        self.seq = 0
        """Stream sequence of the newest valid head."""
        self.last_seq = 0
        """Stream sequence of the last record, valid or not; the next head must name it."""

    def take(self, stored: Any) -> WeightHead:
        """The head record in a stored message. Untrusted (a WeightError) when it is not valid."""
        self.last_seq = max(self.last_seq, stored.seq)
        try:
            head = stored.message
        except (ValueError, LookupError) as error:
            raise Untrusted(f"sequence {stored.seq} of {chain.STREAM} cannot be read: {error}") from None
        if not isinstance(head, WeightHead) or head.run != self.run:
            raise Untrusted(f"sequence {stored.seq} of {chain.STREAM} is no head record of run {self.run}")
        signing.check(self._trust, head)
        # Heads that were written before signatures existed do not name the head before them.
        if self.newest is not None and head.after < self.seq and (head.signature or head.after >= 0):
            raise Untrusted(
                f"the head of version {head.version} at sequence {stored.seq} follows sequence {head.after}, but "
                f"the newest head is at {self.seq}: an old head was stored again"
            )
        self.newest, self.seq = head, stored.seq
        return head


async def read(source: chain.StreamSource, run: str, trust: Trust | None = None) -> Heads:
    """All valid head records so far."""
    heads = Heads(run, trust)
    async for _ in counting(source, heads):
        continue
    return heads


async def counting(source: chain.StreamSource, into: Heads) -> AsyncIterator[tuple[int, WeightHead]]:
    """Sequence and head of every valid record, oldest first."""
    async for stored in source.history(chain.STREAM, subjects.WEIGHT_HEAD.at(run=into.run)):
        try:
            head = into.take(stored)
        except WeightError:
            continue
        yield stored.seq, head
