"""The scavenger: lends the product's rollout actors to training while traffic is low, and reclaims them at once.

A lease is a value in HR_LEASE under the run and the rollout actor's id; its revision is the fencing token. A lent actor
keeps the production lane, so users do not wait for a reclaim. A reclaim removes the lane `train` from the lease, and
the rollout actor then hands its training requests back to the queue.

Traffic has two kinds of sources: gateways, and SGLang servers that other clients use. A server concerns its own rollout
actor only. A gateway concerns the actors of its region, because brokers deliver a client's turn in the region where it
was asked, while an actor answers there. The gateways of a region without such an actor concern every actor, and an
actor whose region is unknown is concerned by every gateway. A rollout actor of the product reports every second, so a
region has an actor while its last report is at most `SILENT_S` old.

An actor is lent and reclaimed by the load of all its sources (`lending`): in a region one actor at a time is lent, and
all of them are reclaimed at once.
"""

import math
import time
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from headrace.actors.scavenger.lending import Lending
from headrace.bus.errors import WrongSequence
from headrace.bus.runtime.actor import Actor
from headrace.messages import subjects
from headrace.messages.product import CapacityLease, Traffic, lease_key

OWN = ("production",)
LENT = ("production", "train")
SILENT_S = 30.0
"""Seconds after which a silent source counts as gone."""


class TrafficSource(NamedTuple):
    """A gateway, or the server of a rollout actor."""

    region: str
    server: str
    """Empty for a gateway."""
    gateway: str


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
        self.lending = {rollout: Lending(self.config.production) for rollout in self.config.production.rollouts}
        self._lent_at: dict[str | None, float] = {}
        """Region to the time of the last lending there, by `time.monotonic`."""
        self.loads: dict[TrafficSource, Load] = {}
        for rollout in self.config.production.rollouts:
            await self.grant(rollout, OWN, "start")
        await self.listen(subjects.TRAFFIC.where(), self.on_traffic)

    async def on_traffic(self, traffic: Traffic) -> None:
        """Decide for the actors that a report concerns."""
        if traffic.run not in ("", self.run):
            return
        now = time.monotonic()
        source = TrafficSource(traffic.region, traffic.server, traffic.gateway)
        self.loads[source] = Load(traffic.active + traffic.waiting, now)
        for source in [source for source, last in self.loads.items() if now - last.at > SILENT_S]:
            del self.loads[source]
        regions = self.regions()
        for rollout in self.config.production.rollouts:
            if traffic.server == rollout or (not traffic.server and _concerns(traffic.region, rollout, regions)):
                await self.decide(rollout, now, regions)

    def regions(self) -> dict[str, str]:
        """The product's rollout actors that report, and their regions; the newest report counts."""
        reports = sorted(self.loads.items(), key=lambda entry: entry[1].at)
        return {source.server: source.region for source, _ in reports if source.server}

    async def decide(self, rollout: str, now: float, regions: Mapping[str, str]) -> None:
        """Lend or reclaim one actor, by the last reports of its sources. now: `time.monotonic`. regions: as
        `regions` returns them."""
        lending, region = self.lending[rollout], regions.get(rollout)
        load = sum(
            last.requests
            for source, last in self.loads.items()
            if source.server == rollout or (not source.server and _concerns(source.region, rollout, regions))
        )
        one_at_a_time = now - self._lent_at.get(region, -math.inf) >= self.config.production.lend_after_s
        if not lending.observe(load, now, may_lend=one_at_a_time):
            return
        written = False
        try:
            written = await self.grant(rollout, LENT if lending.lent else OWN, lending.reason)
        finally:
            if not written:
                lending.undo()  # the next report decides again
            elif lending.lent:
                self._lent_at[region] = now

    async def grant(self, rollout: str, lanes: tuple[str, ...], reason: str) -> bool:
        """Write a lease on top of its newest revision. After a concurrent write it tries again, three times in all;
        False when every try met a concurrent write."""
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
            kind = "lent" if "train" in lanes else "reclaimed"
            await self.event(kind, f"{rollout}: {reason}", rollout=rollout)
            return True
        await self.event(
            "lease_contended", f"{rollout}: another actor wrote its lease three times in a row", level="warning"
        )
        return False


def _concerns(region: str, rollout: str, regions: Mapping[str, str]) -> bool:
    """Whether an actor serves the gateways of a region. regions: those of the actors that report."""
    return regions.get(rollout, region) == region or region not in regions.values()
