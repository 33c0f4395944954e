"""A run whose curriculum waits for an actor that is not alive ends, and names the actor."""

import asyncio
from secrets import token_hex

import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.bus.errors import Unrecoverable
from headrace.messages.operations import Heartbeat
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
ROLES = ("judge", "dead_letter", "trainer", "evaluator")


@pytest.mark.parametrize("absent", [pytest.param(role, marks=pytest.mark.slow) for role in ROLES[:2]] + [*ROLES[2:]])
async def test_a_run_without_an_actor_that_it_needs_ends_and_names_it(connect: Connect, absent: str) -> None:
    run, admin = f"r{token_hex(4)}", await connect()
    presence = await admin.kv("HR_PRESENCE")
    settings = c.Config(
        curriculum=c.Curriculum(actor_wait_s=1.0),
        evaluation=c.Evaluation(heldout_tasks=2, unseen_tasks=0, before=True, after=False),
    )

    async def others_live() -> None:
        while True:
            for role in ROLES:
                alive_for = "another" if role == absent else run
                beat = Heartbeat(actor=role, id="x", node="n", pid=1, state="running", run=alive_for)
                await presence.put(f"{role}.x", beat)
            await asyncio.sleep(0.2)

    beating = asyncio.create_task(others_live())
    try:
        with pytest.raises(Unrecoverable, match=rf"no {absent} of run {run} was alive for 1 s .* actor {absent} --run"):
            async with living(Curriculum, settings, await connect("curriculum"), run), asyncio.timeout(PATIENCE_S):
                await FakeWorkers(admin, run, groups_per_step=2, bound=1).serve(0)
                await asyncio.Event().wait()
    finally:
        beating.cancel()
