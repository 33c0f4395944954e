"""Which head records count: those that a known publisher signed and that follow the one before them.

The idea: a head names the sequence of the head that it was written after. A forged record does not bear its signature;
a true one that somebody stored a second time follows a head that is no longer the last. Both are left out, by everyone
who reads the same stream in the same way, so sender, receivers and auditors agree on the newest version.
"""

from collections.abc import AsyncIterator
from typing import Any

from headrace.messages import subjects
from headrace.messages.weights import WeightHead
from headrace.weights import chain, signing
from headrace.weights.signing import Trust, Untrusted
from headrace.weights.state import WeightError


class Heads:
    """The head records of a run as they come, in order."""

    def __init__(self, run: str, trust: Trust | None):
        """trust: whose heads count; None: everybody's."""
        self.run, self._trust = run, trust
        self.newest: WeightHead | None = None
        self.seq = 0
        """Stream sequence of the newest one that counts."""
        self.last_seq = 0
        """Stream sequence of the last record, whether it counts or not: what the next head is written on top of."""

    def take(self, stored: Any) -> WeightHead:
        """The head record in a stored message; WeightError when it does not count."""
        self.last_seq = max(self.last_seq, stored.seq)
        try:
            head = stored.message
        except (ValueError, LookupError) as error:
            raise Untrusted(f"sequence {stored.seq} of {chain.STREAM} cannot be read: {error}") from None
        if not isinstance(head, WeightHead) or head.run != self.run:
            raise Untrusted(f"sequence {stored.seq} of {chain.STREAM} is no head record of run {self.run}")
        signing.check(self._trust, head)
        # Before there were signatures, heads did not say which one they follow.
        if self.newest is not None and head.after < self.seq and (head.signature or head.after >= 0):
            raise Untrusted(
                f"the head of version {head.version} at sequence {stored.seq} follows sequence {head.after}, but "
                f"{self.seq} came since: somebody stored an old head again"
            )
        self.newest, self.seq = head, stored.seq
        return head


async def read(source: chain.Source, run: str, trust: Trust | None = None) -> Heads:
    """All head records so far. What does not count is left out."""
    found = Heads(run, trust)
    async for _ in counting(source, found):
        continue
    return found


async def counting(source: chain.Source, into: Heads) -> AsyncIterator[tuple[int, WeightHead]]:
    """Sequence and head of every record that counts, oldest first."""
    async for stored in source.history(chain.STREAM, subjects.WEIGHT_HEAD.at(run=into.run)):
        try:
            head = into.take(stored)
        except WeightError:
            continue
        yield stored.seq, head
