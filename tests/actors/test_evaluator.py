"""The evaluator over a real broker: every task once, infrastructure failures apart, and a successor that continues."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Any

import pytest

from headrace.actors.evaluator import Evaluator
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling
from headrace.messages.subjects import DLQ, EVENT, LEDGER
from tests.conftest import Connect
from tests.support import records as r
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def world(connect: Connect) -> AsyncIterator[FakeWorkers]:
    other = FakeWorkers(await connect(), f"r{token_hex(4)}", groups_per_step=1)
    await other.start()
    yield other
    await other.stop()


async def ask(bus: Bus, run: str, tasks: int = 20, **fields: Any) -> EvalRequest:
    settings: dict[str, Any] = {
        "id": "heldout-before",
        "suite": "generated/heldout",
        "policy": PolicyRef("pinned", 3),
        "sampling": Sampling(temperature=0.0, max_turn_tokens=9),
        "isolation": "episode",
        "reason": "heldout_before",
        **fields,
    }
    request = EvalRequest(run=run, tasks=tasks, **settings)
    await bus.publish(EVENT.at(run=run, actor="operator", type="eval_request"), request)
    return request


async def answer(bus: Bus, run: str, id: str = "heldout-before") -> EvalResult:
    async with asyncio.timeout(PATIENCE_S):
        async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="evaluator", type="eval_result")):
            result = received.message
            if isinstance(result, EvalResult) and result.id == id:
                return result
    raise AssertionError


async def issued(bus: Bus, run: str) -> list[SlotIssued]:
    messages = [received.message async for received in bus.history("HR_LEDGER", LEDGER.where(run=run))]
    return [message for message in messages if isinstance(message, SlotIssued)]


async def test_tasks_may_be_named(connect: Connect) -> None:
    async with world(connect) as other, living(Evaluator, Config(), await connect("evaluator"), other.run):
        await ask(other.bus, other.run, 1, ids=("7",))
        request = await other.next_request()
        await other.solve(request, passed=True)
        result = await answer(other.bus, other.run)
    assert (request.task.task, result.passes, result.rate) == ("7", {"7": True}, 1.0)


async def test_every_task_is_run_once_under_the_policy_that_was_named(connect: Connect) -> None:
    async with world(connect) as other, living(Evaluator, Config(), await connect("evaluator"), other.run):
        await ask(other.bus, other.run)
        requests = [await other.next_request() for _ in range(20)]
        for number, request in enumerate(sorted(requests, key=lambda r: (r.group, r.slot))):
            await other.solve(request, passed=number < 15)
        result = await answer(other.bus, other.run)
        slots = await issued(other.bus, other.run)
    assert len({request.task for request in requests}) == 20
    assert {request.group for request in requests} == {f"eheldout-before-{n:06d}" for n in range(3)}
    assert [(slot.lane, slot.group_size) for slot in slots if slot.slot == 0] == [("eval", 8), ("eval", 8), ("eval", 4)]
    assert {(request.lane, request.policy, request.isolation) for request in requests} == {
        ("eval", PolicyRef("pinned", 3), "episode")
    }
    assert {(request.sampling.temperature, request.sampling.max_turn_tokens) for request in requests} == {(0.0, 9)}
    assert len({request.seed for request in requests}) == 20
    assert (result.tasks, result.passed, result.rate, result.infra_failures) == (20, 15, 0.75, 0)
    assert (result.version, result.reason) == (3, "heldout_before")
    assert result.families == {"one_line": (15, 20)}


async def test_our_own_failures_are_tried_again_and_never_count_against_the_policy(connect: Connect) -> None:
    async with world(connect) as other, living(Evaluator, Config(), await connect("evaluator"), other.run):
        await ask(other.bus, other.run, tasks=3)
        first = {request.slot: request for request in [await other.next_request() for _ in range(3)]}
        await other.solve(first[0], passed=True)
        await other.fail(first[1], "sandbox_lost")
        again = await other.next_request()
        assert (again.slot, again.attempt, again.task) == (1, 1, first[1].task)
        await other.solve(again, passed=True)
        await lose(other, first[2])
        for attempt in (1, 2):
            retry = await other.next_request()
            assert (retry.slot, retry.attempt) == (2, attempt)
            await other.fail(retry, "engine_error")
        result = await answer(other.bus, other.run)
    assert (result.tasks, result.passed, result.rate, result.infra_failures) == (3, 2, 1.0, 1)


async def lose(other: FakeWorkers, request: RolloutRequest) -> None:
    """No actor could fill the slot: only a dead letter is left."""
    letter = r.letter(f"{other.run}.{request.trajectory}")
    await other.bus.publish(DLQ.at(stream="hr_task", consumer="rollout"), letter)


async def test_a_successor_asks_again_for_what_is_open_and_counts_what_is_done(connect: Connect) -> None:
    async with world(connect) as other:
        first = Evaluator(Config(), await connect("evaluator"), other.run, "e-1")
        await first.start()
        await ask(other.bus, other.run, tasks=10)
        requests = [await other.next_request() for _ in range(10)]
        for request in requests[:4]:
            await other.solve(request, passed=True)
        for task in list(first._tasks):
            task.cancel()
        for request in requests[4:7]:
            await other.solve(request, passed=True)
        await other.fail(requests[7], "sandbox_lost")
        async with living(Evaluator, Config(), await connect("evaluator"), other.run, "e-2"):
            again = await other.next_request()
            assert (again.task, again.attempt) == (requests[7].task, 1)
            for request in (again, *requests[8:]):
                await other.solve(request, passed=False)
            result = await answer(other.bus, other.run)
        assert (result.tasks, result.passed, result.infra_failures) == (10, 7, 0)
        assert len(await issued(other.bus, other.run)) == 11
        # A third evaluator has nothing to do, and does not answer twice.
        async with living(Evaluator, Config(), await connect("evaluator"), other.run, "e-3") as third:
            assert (third.open, third._asked) == ({}, {})
        where = EVENT.where(run=other.run, actor="evaluator", type="eval_result")
        assert len([r async for r in other.bus.history("HR_EVENT", where)]) == 1


async def test_several_evaluations_at_once_and_training_beside_them(connect: Connect) -> None:
    async with world(connect) as other:
        other.answer = other.solve
        async with living(Evaluator, Config(), await connect("evaluator"), other.run):
            await ask(other.bus, other.run, id="a", tasks=9)
            await ask(other.bus, other.run, id="b", tasks=9, policy=PolicyRef())
            evaluations = await asyncio.gather(*(answer(other.bus, other.run, id) for id in "ab"))
    assert [result.tasks for result in evaluations] == [9, 9]
    assert [result.version for result in evaluations] == [3, 0]


async def test_a_suite_that_there_is_not_is_refused_with_a_reason(connect: Connect) -> None:
    async with world(connect) as other, living(Evaluator, Config(), await connect("evaluator"), other.run):
        await ask(other.bus, other.run, suite="no-such-suite")
        result = await answer(other.bus, other.run)
    assert result.tasks == 0
    assert result.reason.startswith("refused: ")
