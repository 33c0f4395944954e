"""The promoted version in a rollout actor of the product, with a real engine, tiny and untrained."""

import asyncio
from pathlib import Path

import pytest

from headrace.actors.rollout import pins
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.policies import Policies
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.product import CapacityLease, Promotion, lease_key, promotion_key
from headrace.messages.subjects import EVENT
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.staged import config, first, made, prepare, stage, swapped

pytestmark = pytest.mark.anyio


async def test_the_promoted_version_stays_loaded_while_the_actor_serves_the_product(
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a request, and while the actor is lent: a user's first turn after a pause finds its weights."""
    monkeypatch.setattr(pins, "UNPIN_AFTER_S", 0.0)
    run, branch = "b12", "b12-feedback"
    versions, observer = made(tmp_path), await connect("admin")
    await prepare(connect, run)
    for owner, version in ((run, 0), (run, 1), (run, 2), (branch, 1)):
        await stage(observer, owner, "here", version, *versions[version])
    promotions = await (await connect("feedback")).kv("HR_PRODUCT")
    leases = await (await connect("scavenger")).kv("HR_LEASE")
    async with living(Rollout, config(tmp_path), await connect("rollout", node="here"), run, "roll") as actor:

        def loaded(policies: Policies) -> set[int]:
            return set(policies.engine._worker.pinned) if isinstance(policies.engine, EmbeddedEngine) else set()

        async def until(wanted: set[int], policies: Policies = actor._policies) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while loaded(policies) != wanted:
                    await asyncio.sleep(0.01)

        async def lease(*lanes: str) -> None:
            lease = CapacityLease(rollout="roll", lanes=lanes, reason="test", since=0.0)
            await leases.put(lease_key(run, "roll"), lease)
            while actor._lanes != lanes:
                await asyncio.sleep(0.01)

        await promotions.put(promotion_key(run), Promotion(run=run, version=0))
        await until({0})
        await lease("production", "train")
        await first(observer, "HR_EVENT", EVENT.where(run=run, type="weights_swapped"), swapped(2))
        async with actor._policies.pins.use(0):
            pass
        await asyncio.sleep(0)
        assert loaded(actor._policies) == {0}, "the request that used it last does not release it"
        await promotions.put(promotion_key(run), Promotion(run=run, version=1))
        await until({1})
        await lease("train")
        await until(set())
        await promotions.put(promotion_key(run), Promotion(run=run, version=1, branch=branch))
        await lease("production")
        await until({1}, await actor._policies._branch(branch))
        assert not loaded(actor._policies)
