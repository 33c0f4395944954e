"""The gate and promotions over a real broker: asked, measured, promoted, refused, and remembered across restarts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest

from headrace.actors.feedback import Feedback
from headrace.actors.gateway import Gateway
from headrace.bus.nats.received import Received
from headrace.config import Config, Production
from headrace.config import Run as RunSection
from headrace.messages import subjects
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.product import Promotion
from headrace.messages.rollout import PolicyRef, Sampling, Trajectory
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightHead
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
CONFIG = Config(production=Production(gate_tasks=4, feedback_batch=2))


class Gate:
    """The actors around a feedback actor, in the test's hands."""

    def __init__(self, connect: Connect) -> None:
        self.connect, self.run = connect, f"r{uuid4().hex[:8]}"

    async def publish_version(self, version: int) -> None:
        head = WeightHead(run=self.run, version=version, state_hash="h", manifest_seq=1, full_version=0)
        await (await self.connect("weight_sync")).publish(subjects.WEIGHT_HEAD.at(run=self.run), head)

    async def feedback(self, count: int) -> None:
        """Feedback about new trajectories."""
        rollout, gateway = await self.connect("rollout"), await self.connect("gateway")
        for _ in range(count):
            group = f"ab12.{uuid4().hex[:12]}"
            trajectory = Trajectory(
                run=self.run,
                lane="production",
                group=group,
                slot=0,
                attempt=0,
                id=f"{group}-0-0",
                task=TaskRef("generated/heldout", "1"),
                family="",
                seed=0,
                policy=PolicyRef(),
                sampling=Sampling(),
                outcome="finished",
                turns=(),
                diff={},
            )
            await rollout.publish(subjects.TRAJ.at(run=self.run, group=group), trajectory)
            given = UserFeedback(
                tenant="default", user="ab12", run=self.run, trajectory=trajectory.id, thumb="up", training_allowed=True
            )
            await gateway.publish(subjects.FEEDBACK.at(tenant="default", user="ab12"), given)

    async def events(self, actor: str, type: str, wanted: Callable[[Any], bool] = lambda _: True) -> AsyncIterator[Any]:
        operator = await self.connect("operator")
        where = subjects.EVENT.where(run=self.run, actor=actor, type=type)
        async for received in operator.follow("HR_EVENT", where):
            assert isinstance(received, Received)
            if wanted(received.message):
                yield received.message

    async def event(self, kind: str) -> Any:
        """The first event of a kind that the feedback actor publishes."""
        async for message in self.events("feedback", "event", lambda message: message.kind == kind):
            return message

    async def answer(self, request: EvalRequest, passed: int, infra: int = 0) -> None:
        result = EvalResult(
            id=request.id,
            run=self.run,
            suite=request.suite,
            policy=request.policy,
            version=request.policy.version,
            tasks=4,
            passed=passed,
            rate=passed / 4,
            infra_failures=infra,
            reason=request.reason,
        )
        where = subjects.EVENT.at(run=self.run, actor="evaluator", type="eval_result")
        await (await self.connect("evaluator")).publish(where, result)

    async def promote(self, version: int) -> None:
        where = subjects.EVENT.at(run=self.run, actor="operator", type="promotion")
        await (await self.connect("operator")).publish(
            where, Promotion(run=self.run, version=version, reason="by hand")
        )


@pytest.fixture
def gate(connect: Connect) -> Gate:
    return Gate(connect)


async def requests(gate: Gate) -> AsyncIterator[EvalRequest]:
    async for message in gate.events("feedback", "eval_request"):
        yield message


async def test_the_gate_promotes_refuses_and_remembers_its_baseline(gate: Gate, connect: Connect) -> None:
    asked = requests(gate)
    await gate.publish_version(5)
    async with asyncio.timeout(PATIENCE_S):
        async with living(Feedback, CONFIG, await connect("feedback"), gate.run) as first:
            await gate.feedback(2)
            request = await anext(asked)
            assert (request.policy, request.tasks, request.reason) == (PolicyRef("pinned", 5), 4, "gate")
            assert request.limits.max_turns == CONFIG.limits.max_turns, "measured as users are served"
            await gate.answer(request, passed=3)
            promoted = await gate.event("promoted")
            assert (promoted.data["version"], promoted.data["rate"]) == (5, 0.75)
            assert first.promoted is not None and first.promoted.version == 5
        await gate.publish_version(6)
        async with living(Feedback, CONFIG, await connect("feedback"), gate.run) as second:
            assert second.promoted == first.promoted, "a restart does not forget the baseline"
            assert second.scored == 2
            await gate.feedback(2)
            request = await anext(asked)
            assert request.policy.version == 6
            await gate.answer(request, passed=2)
            refused = await gate.event("gate_refused")
            assert "0.50, below 0.75" in refused.text
            assert second.promoted is not None and second.promoted.version == 5


async def test_a_gate_without_a_measured_task_promotes_nothing(gate: Gate, connect: Connect) -> None:
    await gate.publish_version(1)
    async with asyncio.timeout(PATIENCE_S), living(Feedback, CONFIG, await connect("feedback"), gate.run) as actor:
        await gate.feedback(2)
        await gate.answer(await anext(requests(gate)), passed=0, infra=4)
        await gate.event("gate_inconclusive")
        assert actor.promoted is None


async def test_an_operators_promotion_reaches_new_sessions(gate: Gate, connect: Connect, tmp_path: Any) -> None:
    """Also the one of an earlier version; one that was never published is refused."""
    config = Config(run=RunSection(dir=str(tmp_path)))
    (tmp_path / gate.run).mkdir()
    await gate.publish_version(3)
    async with asyncio.timeout(PATIENCE_S), living(Feedback, config, await connect("feedback"), gate.run):
        async with living(Gateway, config, await connect("gateway"), gate.run) as gateway:
            await gate.promote(9)
            assert "from 0 to 3, got 9" in (await gate.event("promotion_refused")).text
            await gate.promote(2)
            while gateway.promoted != PolicyRef("pinned", 2):
                await asyncio.sleep(0.01)
        async with living(Gateway, config, await connect("gateway"), gate.run) as gateway:
            while gateway.promoted != PolicyRef("pinned", 2):  # read again from HR_STATE
                await asyncio.sleep(0.01)
