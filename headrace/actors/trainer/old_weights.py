"""Removes old chains of versions when full snapshots are published."""

import asyncio

from headrace.bus.errors import BusError
from headrace.bus.payloads import retention
from headrace.bus.runtime.actor import Actor
from headrace.weights import chain
from headrace.weights.publishing import collect
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

AGAIN_S = 30.0
"""Seconds until a failed collection is tried again."""


async def forget(actor: Actor) -> None:
    """Follow the versions of the actor's run without end and remove old chains. A failed removal is repeated."""
    section = actor.config.weights
    trust = Trust.load(actor.bus.credentials, section.publishers, unsigned=section.unsigned)

    async def purge(subject: str) -> int:
        return await actor.bus.purge(chain.STREAM, subject=subject)

    async def purge_manifests(subject: str) -> int:
        return await retention.purge_all(actor.bus, chain.STREAM, subject)

    while True:
        try:
            async for gone in collect.follow(
                actor.bus,
                purge,
                actor.run,
                chains=section.collect_chains,
                trust=trust,
                purge_manifests=purge_manifests,
            ):
                text = f"versions {min(gone)} to {max(gone)}: {sum(gone.values())} messages"
                await actor.event("weights_collected", text, versions=len(gone), messages=sum(gone.values()))
        except (BusError, WeightError) as error:
            await actor.event("weights_not_collected", str(error), "warning")
            await asyncio.sleep(AGAIN_S)
