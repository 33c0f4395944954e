"""The scavenger: lends the product's rollout actors to training while traffic is low, and reclaims them at once.

A lease is a value in HR_LEASE under the run and the rollout actor's id; its revision is the fencing token. A lent actor
keeps the production lane, so users do not wait for a reclaim. A reclaim removes the lane `train` from the lease, and
the rollout actor then hands its training requests back to the queue.

Traffic has two kinds of sources: gateways, whose sessions any of the product's actors may serve, and SGLang servers
that other clients use, each of which concerns its own rollout actor only. An actor is lent when the load of all its
sources was at most `reclaim_above` for `lend_after_s` seconds, and reclaimed as soon as it is higher.
"""

import time
from typing import ClassVar, NamedTuple

from headrace.bus.errors import WrongSequence
from headrace.bus.runtime.actor import Actor
from headrace.messages import subjects
from headrace.messages.product import CapacityLease, Traffic, lease_key

OWN = ("production",)
LENT = ("production", "train")
SILENT_S = 30.0
"""Seconds after which a silent source counts as gone."""


class Load(NamedTuple):
    """The last report of a source."""

    requests: int
    """Sessions or requests, running and waiting."""
    at: float


class Scavenger(Actor):
    """Traffic in, leases out."""

    role: ClassVar[str] = "scavenger"

    async def start(self) -> None:
        """Reclaim every actor that an earlier scavenger lent, then follow the traffic."""
        self.leases = await self.bus.kv("HR_LEASE")
        self.lent: dict[str, bool] = {}
        self.quiet_since: dict[str, float] = {}
        self.loads: dict[tuple[str, str], Load] = {}
        """(region, server) to the last report; a gateway's server is empty."""
        for rollout in self.config.production.rollouts:
            await self.grant(rollout, OWN, "start")
        await self.listen(subjects.TRAFFIC.where(), self.on_traffic)

    async def on_traffic(self, traffic: Traffic) -> None:
        """Decide for the actors that a report concerns."""
        if traffic.run not in ("", self.run):
            return
        now = time.monotonic()
        self.loads[traffic.region, traffic.server] = Load(traffic.active + traffic.waiting, now)
        for source in [source for source, last in self.loads.items() if now - last.at > SILENT_S]:
            del self.loads[source]
        for rollout in self.config.production.rollouts:
            if traffic.server in ("", rollout):
                await self.decide(rollout, now)

    async def decide(self, rollout: str, now: float) -> None:
        """Lend or reclaim one actor, by the last reports of its sources. now: `time.monotonic`."""
        rules = self.config.production
        load = sum(last.requests for (_, server), last in self.loads.items() if server in ("", rollout))
        if load > rules.reclaim_above:
            self.quiet_since.pop(rollout, None)
            if self.lent.get(rollout):
                await self.grant(rollout, OWN, f"{load} sessions or requests of the product")
            return
        since = self.quiet_since.setdefault(rollout, now)
        if now - since >= rules.lend_after_s and not self.lent.get(rollout):
            await self.grant(rollout, LENT, f"load at most {rules.reclaim_above} for {now - since:.0f} s")

    async def grant(self, rollout: str, lanes: tuple[str, ...], reason: str) -> None:
        """Write a lease on top of its newest revision. After a concurrent write it tries again, three times in all."""
        lease = CapacityLease(rollout=rollout, lanes=lanes, reason=reason, since=time.time())
        key = lease_key(self.run, rollout)
        for _ in range(3):
            stored = await self.leases.get(key)
            try:
                if stored is None:
                    await self.leases.create(key, lease)
                else:
                    await self.leases.update(key, lease, stored[1])
            except WrongSequence:
                continue
            self.lent[rollout] = "train" in lanes
            kind = "lent" if "train" in lanes else "reclaimed"
            await self.event(kind, f"{rollout}: {reason}", rollout=rollout)
            return
        await self.event(
            "lease_contended", f"{rollout}: another actor wrote its lease three times in a row", level="warning"
        )
