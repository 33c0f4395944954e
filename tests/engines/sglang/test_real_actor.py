"""A rollout actor that starts a real SGLang server, lends it, gives it back, and loses it: no trajectory is lost."""

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.actors.scavenger.actor import LENT, OWN
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.config import Engine as EngineSection
from headrace.engines.server.engine import OneServer
from headrace.messages.operations import Event
from headrace.messages.product import CapacityLease
from headrace.messages.rollout import Limits, RolloutRequest, Sampling
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import EVENT, FAIL, TASK, token
from headrace.messages.tasks import TaskRef
from headrace.tasks import open_suite
from headrace.weights import tensor_state
from tests.actors.rollout.test_actor import event
from tests.actors.rollout.test_policies import end_of
from tests.conftest import Connect
from tests.engines.sglang.test_real import idle
from tests.engines.sglang.test_rollout import POLICY, config
from tests.support import tiny
from tests.support.actors import living
from tests.support.engines import request
from tests.support.sglang.requests import begun
from tests.support.sglang.server_fixture import arguments, checked, python
from tests.support.staged import prepare, stage

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]


async def issue(bus: Bus, run: str, group: str) -> None:
    """An attempt of long turns."""
    wanted = RolloutRequest(
        run=run,
        lane="train",
        group=group,
        slot=0,
        attempt=0,
        task=TaskRef("generated/train", open_suite("generated/train").ids()[0]),
        seed=7,
        sampling=Sampling(max_turn_tokens=512),
        limits=Limits(max_turns=3, max_tokens=1200, context_tokens=6000),
    )
    await bus.publish(TASK.at(run=run, lane="train", suite=token("generated/train")), wanted)


async def engine_of(actor: Rollout) -> OneServer:
    """Once it serves a version."""
    while actor._policies.version < 0:
        await asyncio.sleep(0.05)
    engine = actor._policies.engine
    assert isinstance(engine, OneServer)
    return engine


async def test_lent_given_back_lent_again_and_killed_under_its_turns(connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    digest = tensor_state.write(file, tiny.model(POLICY, exact=False, seed=0).state())
    observer, leases = await connect("admin"), await (await connect("scavenger")).kv("HR_LEASE")

    async def lend(lanes: tuple[str, ...]) -> None:
        await leases.put("s8.lent", CapacityLease(rollout="lent", lanes=lanes, reason="test", since=0.0))

    options = {"python": python(), "args": [*arguments(), "--context-length", "8192"]}
    section = EngineSection(kind="sglang", exact=False, max_batch=8, options=options)  # type: ignore[arg-type]
    settings: Config = config(tmp_path, section)
    await prepare(connect, "s8")
    await stage(observer, "s8", "here", 0, str(file), digest)
    await lend(LENT)
    groups = [f"g{index}" for index in range(6)]
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Rollout, settings, await connect("rollout", node="here"), "s8", "lent") as actor,
    ):
        engine = await engine_of(actor)
        for group in groups[:4]:
            await issue(observer, "s8", group)
        await begun(engine, 2)
        began = time.perf_counter()
        await lend(OWN)
        await idle(engine)
        print(f"given back {1e3 * (time.perf_counter() - began):.0f} ms after the lease was written")
        await event(observer, "s8", "handed_back")
        user = msgspec.structs.replace(request("user", ids=(5, 6, 7)), lane="production")
        assert len((await engine.sample(user)).ids) == 8 and not engine._in_flight
        await lend(LENT)
        for group in groups[4:]:
            await issue(observer, "s8", group)
        await begun(engine, 2)
        server = engine._server
        assert server is not None and server.process is not None
        os.killpg(server.process.pid, signal.SIGKILL)
        ends = [await end_of(observer, "s8", group) for group in groups]
        assert engine.counts["lost"] >= 2 and engine.stats()["starts"] == 2 and checked(engine)
        await event(observer, "s8", "server_lost")
    assert all(end.attempt == 0 and end.turns for end in ends)
    assert {span.version for end in ends for turn in end.turns for span in turn.spans} == {0}
    assert [r async for r in observer.history("HR_LEDGER", FAIL.where(run="s8"))] == []
    said = [r.message async for r in observer.history("HR_EVENT", EVENT.where(run="s8", type="event"))]
    kinds = [record.kind for record in said if isinstance(record, Event)]
    assert kinds.count("server_started") == 2 and kinds.count("handed_back") >= 1
