"""The curriculum's evaluations while training goes on."""

import asyncio

import msgspec
import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.subjects import EVENT
from tests.actors.test_curriculum import config, new_run, until_finished, world
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_evaluations_while_training_pin_the_served_version_and_a_successor_asks_for_none_again(
    connect: Connect,
) -> None:
    run = new_run()
    settings = msgspec.structs.replace(
        config(steps=4),
        evaluation=c.Evaluation(
            before=False, after=False, every=2, every_suites=("generated/dev", "generated/unseen"), every_tasks=3
        ),
    )
    asked: list[EvalRequest] = []

    async def requests(count: int) -> None:
        where = EVENT.where(run=run, type=EvalRequest.type_name)
        asked.clear()
        async with asyncio.timeout(PATIENCE_S):
            async for received in other.bus.follow("HR_EVENT", where):
                asked.append(received.message)
                if len(asked) == count:
                    return

    async with world(connect, run) as other:
        other.answer = other.solve
        async with living(Curriculum, settings, await connect("curriculum"), run):
            for steps in (1, 2):
                await other.closed(2 * steps)
                await other.step()
            await requests(2)
            for steps in (3, 4):  # no result came, and training goes on
                await other.closed(2 * steps)
                await other.step()
            await requests(4)
        versions = {request.id: request.policy.version for request in asked}
        assert list(versions) == [
            "step-2-generated-dev",
            "step-2-generated-unseen",
            "step-4-generated-dev",
            "step-4-generated-unseen",
        ]
        assert versions["step-2-generated-dev"] == versions["step-2-generated-unseen"] == 2
        assert versions["step-4-generated-dev"] == versions["step-4-generated-unseen"] == 4
        assert {(request.suite, request.tasks, request.policy.kind) for request in asked} == {
            ("generated/dev", 3, "pinned"),
            ("generated/unseen", 3, "pinned"),
        }
        async with living(Curriculum, settings, await connect("curriculum"), run):
            for request in asked:
                result = EvalResult(
                    id=request.id,
                    run=run,
                    suite=request.suite,
                    policy=request.policy,
                    version=request.policy.version,
                    tasks=3,
                    passed=1,
                    rate=1 / 3,
                    infra_failures=0,
                )
                where = EVENT.at(run=run, actor="evaluator", type=EvalResult.type_name)
                await other.bus.publish(where, result)
            await until_finished(other.bus, run)
        where = EVENT.where(run=run, type=EvalRequest.type_name)
        assert len([entry async for entry in other.bus.history("HR_EVENT", where)]) == 4
