"""The scavenger: lends the product's rollout actors to training while traffic is low, and takes them back at once.

A lease is a value in HR_LEASE under the run and the rollout actor's id; its revision is the fencing token. A lent actor
keeps the production lane, so the first user of the morning never waits for a decision; taking back means that the lane
`train` leaves the lease, upon which the rollout actor hands its training requests back to the queue.

Traffic has two kinds of sources: gateways, whose sessions any of the product's actors may have to serve, and servers,
that others use beside headrace; these speak for their own rollout actor alone. An actor is lent while all of its
sources are quiet, and taken back at the first word of any of them.
"""

import time
from typing import ClassVar, NamedTuple

from headrace.bus.actor import Actor
from headrace.bus.errors import WrongSequence
from headrace.messages import subjects
from headrace.messages.product import CapacityLease, Traffic, lease_key

OWN = ("production",)
LENT = ("production", "train")
SILENT_S = 30.0
"""A source that said nothing for so long is gone, and its last word with it."""


class Word(NamedTuple):
    """The last that a source said."""

    load: int
    """Sessions or requests, running and waiting."""
    at: float


class Scavenger(Actor):
    """Traffic in, leases out."""

    role: ClassVar[str] = "scavenger"

    async def start(self) -> None:
        """Take back whatever a predecessor lent, then follow the traffic."""
        self.leases = await self.bus.kv("HR_LEASE")
        self.lent: dict[str, bool] = {}
        self.quiet_since: dict[str, float] = {}
        self.words: dict[tuple[str, str], Word] = {}
        """By region and server; a gateway's server is empty."""
        for rollout in self.config.production.rollouts:
            await self.grant(rollout, OWN, "start")
        await self.listen(subjects.TRAFFIC.where(), self.on_traffic)

    async def on_traffic(self, traffic: Traffic) -> None:
        """Hysteresis on one side only: lending waits for a quiet while, reclaiming never waits."""
        if traffic.run not in ("", self.run):
            return
        now = time.monotonic()
        self.words[traffic.region, traffic.server] = Word(traffic.active + traffic.waiting, now)
        for source in [source for source, word in self.words.items() if now - word.at > SILENT_S]:
            del self.words[source]
        for rollout in self.config.production.rollouts:
            if traffic.server in ("", rollout):
                await self.decide(rollout, now)

    async def decide(self, rollout: str, now: float) -> None:
        """Lend or take back one actor, from the last words of all that may need it."""
        rules = self.config.production
        load = sum(word.load for (_, server), word in self.words.items() if server in ("", rollout))
        if load > rules.reclaim_above:
            self.quiet_since.pop(rollout, None)
            if self.lent.get(rollout):
                await self.grant(rollout, OWN, f"{load} sessions or requests of the product")
            return
        since = self.quiet_since.setdefault(rollout, now)
        if now - since >= rules.lend_after_s and not self.lent.get(rollout):
            await self.grant(rollout, LENT, f"quiet for {now - since:.0f} s")

    async def grant(self, rollout: str, lanes: tuple[str, ...], reason: str) -> None:
        """Write a lease over the newest revision; a concurrent scavenger's write is read again, never overwritten
        blindly."""
        lease = CapacityLease(rollout=rollout, lanes=lanes, reason=reason, since=time.time())
        key = lease_key(self.run, rollout)
        for _ in range(3):
            held = await self.leases.get(key)
            try:
                if held is None:
                    await self.leases.create(key, lease)
                else:
                    await self.leases.update(key, lease, held[1])
            except WrongSequence:
                continue
            self.lent[rollout] = "train" in lanes
            kind = "lent" if "train" in lanes else "reclaimed"
            await self.event(kind, f"{rollout}: {reason}", rollout=rollout)
            return
        await self.event("lease_contended", f"{rollout}: someone else keeps writing its lease", level="warning")
