"""A run whose curriculum waits for an actor that is not alive ends, and names the actor."""

import asyncio
from secrets import token_hex

import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.bus.errors import Unrecoverable
from headrace.ledger import losses
from headrace.messages.operations import Heartbeat
from headrace.messages.rollout import RolloutRequest
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
        rollout=c.Rollout(wait_s=1.0),
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
        says = rf"no {absent} of run {run} was alive for 1 s .* actor {absent} --config TOML --run"
        with pytest.raises(Unrecoverable, match=says):
            async with living(Curriculum, settings, await connect("curriculum"), run), asyncio.timeout(PATIENCE_S):
                await FakeWorkers(admin, run, groups_per_step=2, bound=1).serve(0)
                await asyncio.Event().wait()
    finally:
        beating.cancel()


async def test_a_run_that_only_loses_groups_ends_and_names_the_causes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit, sandboxes that all fail at once gave thousands of groups in minutes and no step."""
    monkeypatch.setattr(losses, "LIMIT", 3)
    run = f"r{token_hex(4)}"
    settings = c.Config(
        curriculum=c.Curriculum(group_size=2, groups_per_step=2, attempts=1),
        evaluation=c.Evaluation(before=False, after=False),
    )
    other = FakeWorkers(await connect(), run, groups_per_step=2)
    lost = 0

    async def answer(request: RolloutRequest) -> None:
        """Two groups are lost, the third is scored, and from then on every attempt fails."""
        nonlocal lost
        if request.group == "g000002":
            await other.solve(request)
        else:
            lost += 1
            await other.fail(request, "sandbox_lost")

    other.answer = answer
    await other.start()
    told = r"3 groups in a row .*attempts of g\d+ failed by: sandbox_lost 2; .*start the run again"
    with pytest.raises(Unrecoverable, match=told):
        async with living(Curriculum, settings, await connect("curriculum"), run), asyncio.timeout(PATIENCE_S):
            await other.serve(0)
            await asyncio.Event().wait()
    await other.stop()
    assert lost >= 6, "the group with scores does not count"
