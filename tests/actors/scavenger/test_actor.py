"""The scavenger lends capacity after a time without traffic and reclaims it at once, over a real broker."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headrace.actors.scavenger import actor as scavenger
from headrace.actors.scavenger.actor import LENT, OWN, Scavenger
from headrace.bus.connection import Bus
from headrace.config import Config, Production
from headrace.messages import subjects
from headrace.messages.product import CapacityLease, Traffic, lease_key
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
Connect = Callable[..., Awaitable[Bus]]


def traffic(active: int, waiting: int = 0) -> Traffic:
    return Traffic(region="here", active=active, waiting=waiting, requests_per_s=0.0, capacity=1)


async def test_quiet_lends_and_one_session_takes_back(connect: Connect) -> None:
    bus, gateway, reader = await connect("scavenger"), await connect("gateway"), await connect("operator")
    config = Config(production=Production(lend_after_s=0.05, forecast_s=0.0, rollouts=("product",)))
    actor = Scavenger(config, bus, "r1", "scavenger-1")
    await actor.start()
    leases = await reader.kv("HR_LEASE")
    seen: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()

    async def watch() -> None:
        async for _, lease, _ in leases.watch("r1.product"):
            if isinstance(lease, CapacityLease):
                seen.put_nowait(lease.lanes)

    watching = asyncio.create_task(watch())
    try:
        assert await asyncio.wait_for(seen.get(), PATIENCE_S) == OWN
        where = subjects.TRAFFIC.at(region="here")
        began = time.monotonic()
        while seen.empty():
            await gateway.emit(where, traffic(0))
            await asyncio.sleep(0.01)
        assert await seen.get() == LENT
        assert time.monotonic() - began >= 0.05, "lending waits for a quiet while"
        await gateway.emit(where, traffic(0, waiting=1))
        assert await asyncio.wait_for(seen.get(), PATIENCE_S) == OWN
    finally:
        watching.cancel()
        await actor.shut(1.0)


async def test_a_successor_takes_back_what_was_lent(connect: Connect) -> None:
    bus, reader = await connect("scavenger"), await connect("operator")
    config = Config(production=Production(rollouts=("a2",)))
    leases = await bus.kv("HR_LEASE")
    await leases.put("r1.a2", CapacityLease(rollout="a2", lanes=LENT, reason="before", since=0.0))
    actor = Scavenger(config, bus, "r1", "scavenger-2")
    await actor.start()
    held = await (await reader.kv("HR_LEASE")).get("r1.a2")
    assert held is not None and isinstance(held[0], CapacityLease)
    assert held[0].lanes == OWN
    await actor.shut(1.0)


class Told:
    """A scavenger that gets traffic from the test, and whose leases the test reads."""

    def __init__(self, config: Config, bus: Bus) -> None:
        self.actor = Scavenger(config, bus, "r1", "scavenger-3")

    async def lanes(self, rollout: str) -> tuple[str, ...]:
        held = await self.actor.leases.get(lease_key("r1", rollout))
        assert held is not None and isinstance(held[0], CapacityLease)
        return held[0].lanes


async def test_a_server_that_others_use_is_taken_back_and_its_neighbour_is_not(connect: Connect) -> None:
    config = Config(production=Production(lend_after_s=0.0, lend_again_s=0.0, forecast_s=0.0, rollouts=("a3", "a4")))
    told = Told(config, await connect("scavenger"))
    await told.actor.start()
    hear = told.actor.on_traffic
    await hear(traffic(0))
    assert (await told.lanes("a3"), await told.lanes("a4")) == (LENT, LENT)
    await hear(msgspec.structs.replace(traffic(2), server="a3"))
    assert (await told.lanes("a3"), await told.lanes("a4")) == (OWN, LENT)
    await hear(traffic(0))
    assert await told.lanes("a3") == OWN, "a quiet gateway says nothing about the server's own users"
    await hear(msgspec.structs.replace(traffic(0), server="a3"))
    assert await told.lanes("a3") == LENT
    await hear(msgspec.structs.replace(traffic(5), run="another"))
    assert await told.lanes("a3") == LENT, "another run's users are another scavenger's"
    await hear(msgspec.structs.replace(traffic(1), region="far", run="r1"))
    assert (await told.lanes("a3"), await told.lanes("a4")) == (OWN, OWN)
    await hear(traffic(0))
    assert await told.lanes("a4") == OWN, "one region's quiet does not lend what another needs"
    await hear(msgspec.structs.replace(traffic(0), region="far", run="r1"))
    assert await told.lanes("a4") == LENT
    await hear(msgspec.structs.replace(traffic(1), gateway="second"))
    await hear(msgspec.structs.replace(traffic(0), gateway="first"))
    assert await told.lanes("a4") == OWN, "a region may have several gateways"
    await told.actor.shut(1.0)


async def test_an_actor_is_lent_by_the_load_of_its_region(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by that of regions without an actor, whose clients it serves too."""
    rollouts = ("a6", "a7", "a8")
    config = Config(production=Production(lend_after_s=0.0, lend_again_s=0.0, forecast_s=0.0, rollouts=rollouts))
    told = Told(config, await connect("scavenger"))
    await told.actor.start()

    async def hear(region: str, active: int = 0, server: str = "") -> None:
        await told.actor.on_traffic(msgspec.structs.replace(traffic(active), region=region, server=server))

    async def lent() -> set[str]:
        return {rollout for rollout in rollouts if await told.lanes(rollout) == LENT}

    await hear("eu", 1)
    await hear("us")
    assert await lent() == set(), "no region is known, so every gateway concerns every actor"
    for rollout, region in (("a6", "eu"), ("a7", "us")):
        await hear(region, server=rollout)
    await hear("us")
    assert await lent() == {"a7"}, "a6 serves the load of eu, and a8 has not said where it is"
    await hear("eu")
    assert await lent() == {"a6", "a7", "a8"}
    await hear("us", 1)
    assert await lent() == {"a6"}
    await hear("us")
    await hear("asia", 1)
    assert await lent() == set(), "a region without an actor is served by all"
    await hear("asia", server="a8")
    await hear("eu")
    await hear("us")
    assert await lent() == {"a6", "a7"}, "now it has one of its own"
    await hear("asia")
    assert await lent() == {"a6", "a7", "a8"}
    monkeypatch.setattr(scavenger, "SILENT_S", 0.0)  # every earlier report is too old: no actor reports any more
    await hear("us", 1)
    assert await lent() == set(), "an actor that fell silent serves no region"
    await told.actor.shut(1.0)


async def test_lending_waits_between_two_actors_of_one_region_alone(connect: Connect) -> None:
    rollouts = ("a9", "b1", "b2")
    config = Config(production=Production(lend_after_s=60.0, lend_again_s=0.0, forecast_s=0.0, rollouts=rollouts))
    told = Told(config, await connect("scavenger"))
    await told.actor.start()
    for rollout, region in (("a9", "eu"), ("b1", "eu"), ("b2", "us")):
        await told.actor.on_traffic(msgspec.structs.replace(traffic(0), region=region, server=rollout))
    regions = told.actor.regions()
    now = time.monotonic()
    for later in (0.0, 60.0):
        for rollout in rollouts:
            await told.actor.decide(rollout, now + later, regions)
    assert [await told.lanes(rollout) for rollout in rollouts] == [LENT, OWN, LENT]
    await told.actor.shut(1.0)


async def test_a_source_that_fell_silent_holds_nothing(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(production=Production(lend_after_s=0.0, lend_again_s=0.0, forecast_s=0.0, rollouts=("a5",)))
    told = Told(config, await connect("scavenger"))
    await told.actor.start()
    await told.actor.on_traffic(msgspec.structs.replace(traffic(3), region="gone"))
    await told.actor.on_traffic(traffic(0))
    assert await told.lanes("a5") == OWN
    monkeypatch.setattr(scavenger, "SILENT_S", 0.0)
    await told.actor.on_traffic(traffic(0))
    assert await told.lanes("a5") == LENT
    await told.actor.shut(1.0)
