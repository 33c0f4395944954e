"""The feedback actor over a real broker: each rating ends once, batches are closed, candidates pass the gate."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec
import pytest

from headrace.actors.feedback.actor import Feedback
from headrace.actors.gateway import Gateway
from headrace.bus.connection import Bus
from headrace.config import Config, Production, branch_config
from headrace.config import Feedback as FeedbackSection
from headrace.config import Gate as GateSection
from headrace.config import Run as RunSection
from headrace.messages import subjects
from headrace.messages.base import Array
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import GroupClosed
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.product import GateVerdict, Promotion, PurgeUser, ShadowTurn
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import StepDone
from headrace.messages.weights import WeightHead
from headrace.replay.audit import prove
from headrace.replay.feedback import feedback_books
from tests.conftest import Connect
from tests.support.actors import living

pytestmark = pytest.mark.anyio


def settings(folder: Path, gate: GateSection | None = None, training: bool = True, **feedback: Any) -> Config:
    return Config(
        run=RunSection(dir=str(folder)),
        production=Production(training_allowed=training),
        feedback=FeedbackSection(**({"enabled": True, "batch": 2} | feedback)),
        gate=gate or GateSection(),
    )


class Product:
    """The parts around a feedback actor: what they publish, and what it answers."""

    def __init__(self, connect: Connect, folder: Path) -> None:
        self.connect, self.run, self.folder = connect, f"r{uuid4().hex[:8]}", folder
        self.branch = f"{self.run}-feedback"
        self._buses: dict[str, Bus] = {}
        (folder / self.run).mkdir()

    async def bus(self, role: str) -> Bus:
        if role not in self._buses:
            self._buses[role] = await self.connect(role)
        return self._buses[role]

    async def version(self, version: int, run: str = "") -> None:
        run = run or self.run
        head = WeightHead(run=run, version=version, state_hash=f"h{version}", manifest_seq=1, full_version=0)
        await (await self.bus("weight_sync")).publish(subjects.WEIGHT_HEAD.at(run=run), head)

    async def promote(self, version: int, branch: str = "") -> None:
        where = subjects.EVENT.at(run=self.run, actor="operator", type="promotion")
        promotion = Promotion(run=self.run, version=version, branch=branch, reason="by hand")
        await (await self.bus("operator")).publish(where, promotion)

    async def session(self, policy: PolicyRef, user: str = "ab12") -> str:
        """The id of the trajectory of a new session."""
        group = f"{user}.{uuid4().hex[:12]}"
        turn = Turn(
            index=0,
            segment=0,
            prompt_ids=Array.of([1, 2], "<i4"),
            ids=Array.of([3], "<i4"),
            logprobs=Array.of([-1.0], "<f4"),
            spans=(Span(0, 2, policy.version),),
        )
        trajectory = Trajectory(
            run=self.run,
            lane="production",
            group=group,
            slot=0,
            attempt=0,
            id=f"{group}-0-0",
            task=TaskRef("client", "default"),
            family="client",
            seed=0,
            policy=policy,
            sampling=Sampling(),
            outcome="finished",
            turns=(turn,),
            diff={},
        )
        await (await self.bus("rollout")).publish(subjects.TRAJ.at(run=self.run, group=group), trajectory)
        return trajectory.id

    async def rate(self, trajectory: str, thumb: Literal["up", "down"] = "up", **changes: Any) -> int:
        user = trajectory.partition(".")[0]
        fields: dict[str, Any] = {"tenant": "default", "training_allowed": True} | changes
        given = UserFeedback(user=user, run=self.run, trajectory=trajectory, thumb=thumb, **fields)
        return await (await self.bus("gateway")).publish(subjects.FEEDBACK.at(tenant="default", user=user), given)

    async def event(self, wanted: Callable[[Any], bool], run: str = "", actor: str = "feedback") -> Any:
        """The first message on the run's events that fits."""
        where = subjects.EVENT.where(run=run or self.run, actor=actor)
        async for received in (await self.bus("operator")).follow("HR_EVENT", where):
            if wanted(received.message):
                return received.message

    async def said(self, kind: str) -> Any:
        return await self.event(lambda message: getattr(message, "kind", "") == kind)

    async def verdict(self, stage: str, version: int) -> GateVerdict:
        found = await self.event(
            lambda message: (
                isinstance(message, GateVerdict) and message.stage == stage and message.candidate.version == version
            )
        )
        assert isinstance(found, GateVerdict)
        return found

    async def opened(self) -> None:
        """Version 7 is promoted, and the branch begins there."""
        await self.version(7)
        await self.promote(7)
        await self.said("branch_opened")

    async def step(self, step: int) -> None:
        """The branch's trainer takes a step."""
        groups = [received.message async for received in (await self.bus("admin")).history(
            "HR_SCORE", subjects.CLOSE.where(run=self.branch)
        )]  # fmt: skip
        names = tuple(each.group for each in groups if isinstance(each, GroupClosed))[2 * step : 2 * step + 2]
        done = StepDone(
            run=self.branch,
            step=step,
            manifest_seq=1,
            groups=names,
            staleness_bound=1,
            waited_s=0.0,
            version=step + 1,
            state_hash="h",
            trained_slots=2,
        )
        await (await self.bus("trainer")).publish(subjects.STEP.at(run=self.branch), done)


@pytest.fixture
def product(connect: Connect, tmp_path: Path) -> Product:
    return Product(connect, tmp_path)


BASE = PolicyRef("pinned", 7)


async def test_every_rating_ends_once_and_the_rest_becomes_batches(product: Product, connect: Connect) -> None:
    config = settings(product.folder, user_cap=3)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run) as actor:
        await product.opened()
        first = await product.session(BASE)
        await product.rate(first, "down", signal="followup")
        await product.rate(first, "up", signal="diff")
        await product.rate(first, "down", signal="undo")
        await product.rate(first, "down", signal="followup")
        await product.rate(first, "down")
        await product.rate(first, "up")
        await product.rate(first, "down", signal="diff")
        await product.rate(await product.session(BASE), training_allowed=False)
        await product.rate(await product.session(BASE), untrainable="greedy")
        await product.rate("ab12.000000000000-0-0")
        await product.rate(await product.session(PolicyRef("pinned", 3)))
        await product.rate(await product.session(BASE, user="cd34"), "down")
        await product.said("batch_closed")
        await product.rate(first, "down")
        for _ in range(3):
            await product.rate(await product.session(BASE))
        while len(actor.book.ratings) < 16:
            await asyncio.sleep(0.01)
        async with actor._one_at_a_time:
            ends = actor.book.ends({product.branch: actor.branch.state})
    assert ends == {
        "superseded": 6, "opted_out": 1, "discarded": 1, "unattributed": 1, "late": 2, "capped": 1, "pending": 4,
    }  # fmt: skip
    bus = await connect("replay")
    closings = [r.message async for r in bus.history("HR_SCORE", subjects.CLOSE.where(run=product.branch))]
    rewards = [each.slots[0].reward for each in closings if isinstance(each, GroupClosed)]
    assert rewards[:2] == [1.0, 0.0], "the last thumb counts, and no diff after it"
    copied = await bus.last("HR_TRAJ", subjects.TRAJ.at(run=product.branch, group=first.rsplit("-", 2)[0]))
    assert copied is not None and copied.message.oldest_version == 0, "the promoted version is the branch's version 0"


async def test_a_restart_goes_on_and_the_audit_proves_the_books(product: Product, connect: Connect) -> None:
    config = settings(product.folder)
    admin = await connect("admin")
    async with asyncio.timeout(120):
        async with living(Feedback, config, await connect("feedback"), product.run):
            await product.opened()
            await product.rate(await product.session(BASE))
        for _ in range(3):
            await product.rate(await product.session(BASE))
        async with living(Feedback, config, await connect("feedback"), product.run) as actor:
            while len(actor.branch.state.closings) < 4:
                await asyncio.sleep(0.01)
            await product.step(0)
            while actor.book.ends({product.branch: actor.branch.state})["trained"] < 2:
                await asyncio.sleep(0.01)
    report, branches, faults = await feedback_books(admin, product.run)
    assert report is not None and report.balanced and faults == [] and branches == [product.branch]
    assert (report.received, report.ends["trained"], report.ends["pending"]) == (4, 2, 2)
    whole, _ = await prove(admin, product.run)
    assert whole.feedback == report and whole.branches[product.branch].issued == 4
    # A closing that no rating stands for is found.
    extra = [r.message async for r in admin.history("HR_SCORE", subjects.CLOSE.where(run=product.branch))][-1]
    forged = msgspec.structs.replace(extra, group="ef56.000000000000")
    issued = [r.message async for r in admin.history("HR_LEDGER", subjects.LEDGER.where(run=product.branch))][-1]
    where = {"run": product.branch, "group": forged.group}
    await admin.publish(subjects.LEDGER.at(**where), msgspec.structs.replace(issued, group=forged.group))
    await admin.publish(subjects.CLOSE.at(**where), forged)
    _, _, faults = await feedback_books(admin, product.run)
    assert any("no rating names it" in fault for fault in faults)


async def test_consent_counts_again_when_a_batch_is_made(product: Product, connect: Connect) -> None:
    async with asyncio.timeout(120):
        async with living(Feedback, settings(product.folder), await connect("feedback"), product.run):
            await product.opened()
            await product.rate(await product.session(BASE))
        refused = settings(product.folder, training=False)
        async with living(Feedback, refused, await connect("feedback"), product.run) as actor:
            await product.rate(await product.session(BASE))
            while actor.book.ends({})["opted_out"] < 2:
                await asyncio.sleep(0.01)
            assert not actor.branch.state.closings


async def test_a_purged_user_is_in_the_books_and_nowhere_else(product: Product, connect: Connect) -> None:
    config = settings(product.folder)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run) as actor:
        await product.opened()
        await product.rate(await product.session(BASE, "gone"))
        await product.rate(await product.session(BASE, "stays"))
        await product.said("batch_closed")
        await product.step(0)
        await product.rate(await product.session(BASE, "gone"))
        while actor.book.ends({product.branch: actor.branch.state})["trained"] < 2 or len(actor.book.ratings) < 3:
            await asyncio.sleep(0.01)
        gateway = await product.bus("gateway")
        subject = subjects.RPC.at(service="feedback", method="purge")
        answer = await gateway.request(subject, PurgeUser(user="gone"), timeout=60.0)
        assert "after 0 were trained on" in answer.detail  # type: ignore[attr-defined]
    admin = await connect("admin")
    for stream in ("HR_FEEDBACK", "HR_TRAJ", "HR_SCORE"):
        held = [r.subject async for r in admin.history(stream, *_all_of(stream, product)) if ".gone" in r.subject]
        assert [subject for subject in held if not subject.startswith("hr.close.")] == []
    report, _, faults = await feedback_books(admin, product.run)
    assert report is not None and faults == []
    assert (report.received, report.ends["trained"], report.ends["purged"]) == (3, 2, 1)


def _all_of(stream: str, product: Product) -> list[str]:
    if stream == "HR_FEEDBACK":
        return [subjects.FEEDBACK.where(), subjects.FATE.where(run=product.run)]
    kind = subjects.TRAJ if stream == "HR_TRAJ" else subjects.SCORE
    return [kind.where(run=product.run), kind.where(run=product.branch)]


async def test_a_candidate_goes_through_benchmark_shadow_and_canary(product: Product, connect: Connect) -> None:
    """Killed in the middle: the stage and its counts are kept."""
    rules = GateSection(tasks=20, trials=2, shadow=2, canary=(0.25,), sessions=3)
    config = settings(product.folder, rules, batch=50, user_cap=0)
    candidate = PolicyRef("pinned", 1, run=product.branch)
    async with asyncio.timeout(120):
        async with living(Feedback, config, await connect("feedback"), product.run) as actor:
            await product.opened()
            await product.version(1, product.branch)
            # Tasks 4 to 17 differ: from 4 to 7 in one trial, from 8 to 13 in both, from 14 to 17 in one.
            for policy, trial, passed in ((BASE, 0, 4), (candidate, 0, 18), (BASE, 1, 8), (candidate, 1, 14)):
                await answer(product, await asked(product, policy, trial), passed)
            compared = await product.verdict("shadow", 1)
            assert "lower bound" in compared.reason and (compared.benchmark.won, compared.benchmark.lost) == (14, 0)
            for _ in range(2):
                where = subjects.EVENT.at(run=product.run, actor="gateway", type="shadow_turn")
                await (await product.bus("gateway")).publish(
                    where, ShadowTurn(run=product.run, policy=candidate, ok=True)
                )
            assert (await product.verdict("canary", 1)).shadowed == 2
            await product.rate(await product.session(candidate))
            while actor.gate.state.treated.sessions < 1:
                await asyncio.sleep(0.01)
        async with living(Feedback, config, await connect("feedback"), product.run) as actor:
            assert actor.gate.state.treated.sessions == 1
            for _ in range(2):
                await product.rate(await product.session(BASE))
                await product.rate(await product.session(candidate))
            done = await product.verdict("promoted", 1)
            assert (done.treated.sessions, done.control.sessions) == (3, 2)
            while actor.promoted is None or actor.promoted.policy != candidate:
                await asyncio.sleep(0.01)
        # The receiver of the branch keeps what is promoted: it reads its own run's events alone.
        told = await product.event(lambda message: isinstance(message, Promotion), run=product.branch)
        assert (told.run, told.version) == (product.branch, 1)


async def asked(product: Product, policy: PolicyRef, trial: int) -> EvalRequest:
    """The gate's request to evaluate a version in one of its trials, which are its seeds."""
    request = await product.event(
        lambda message: isinstance(message, EvalRequest) and (message.policy, message.seed) == (policy, trial)
    )
    assert isinstance(request, EvalRequest)
    return request


async def answer(product: Product, request: EvalRequest, passed: int) -> None:
    result = EvalResult(
        id=request.id,
        run=product.run,
        suite=request.suite,
        policy=request.policy,
        version=request.policy.version,
        tasks=20,
        passed=passed,
        rate=passed / 20,
        infra_failures=0,
        passes={str(task): task < passed for task in range(20)},
    )
    where = subjects.EVENT.at(run=product.run, actor="evaluator", type="eval_result")
    await (await product.bus("evaluator")).publish(where, result)


async def test_an_operators_promotion_reaches_new_sessions_and_ends_the_candidate(
    product: Product, connect: Connect
) -> None:
    """Also the one of an earlier version; one that was never published is refused."""
    config = settings(product.folder, GateSection(canary=(0.25,)))
    candidate = PolicyRef("pinned", 1, run=product.branch)
    async with asyncio.timeout(120):
        async with living(Feedback, config, await connect("feedback"), product.run):
            async with living(Gateway, config, await connect("gateway"), product.run) as gateway:
                await product.opened()
                await product.promote(9)
                assert "from 0 to 7, got 9" in (await product.said("promotion_refused")).text
                await product.version(1, product.branch)
                await product.verdict("canary", 1)
                while gateway.split.gate.stage != "canary":
                    await asyncio.sleep(0.01)
                served = [gateway.split.policy(f"ab.{number}") for number in range(400)]
                assert {*served} == {BASE, candidate} and 50 < served.count(candidate) < 150
                assert served == [gateway.split.policy(f"ab.{number}") for number in range(400)], "a session keeps it"
                await product.promote(2)
                await product.verdict("rolled_back", 1)
                while gateway.split.promoted != PolicyRef("pinned", 2):
                    await asyncio.sleep(0.01)
                assert {gateway.split.policy(f"ab.{number}") for number in range(400)} == {PolicyRef("pinned", 2)}
        async with living(Gateway, config, await connect("gateway"), product.run) as gateway:
            while gateway.split.promoted != PolicyRef("pinned", 2):  # read again from HR_STATE
                await asyncio.sleep(0.01)


def test_the_branch_is_configured_as_the_run_but_for_its_batches() -> None:
    config = Config(feedback=FeedbackSection(enabled=True, batch=5, staleness=3, learning_rate=0.5))
    made = branch_config(config, "r")
    assert (made.feedback.base, made.curriculum.groups_per_step, made.curriculum.staleness) == ("r", 5, 3)
    assert (made.algorithm.baseline, made.algorithm.learning_rate, made.mid_training.tokens) == ("class", 0.5, 0)
    assert made.policy == config.policy


async def test_of_two_feedback_actors_the_later_acts_and_the_earlier_stands_down(
    product: Product, connect: Connect
) -> None:
    """It does not fail: its supervisor would start it again, and its fence would end the later one."""
    config = settings(product.folder)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run) as early:
        await product.opened()
        await product.rate(await product.session(BASE))
        async with living(Feedback, config, await connect("feedback"), product.run) as late:
            await product.said("superseded")
            await product.rate(await product.session(BASE))
            await product.said("batch_closed")
            await product.promote(7)
            while late.promoted is None:
                await asyncio.sleep(0.01)
            await product.rate(await product.session(BASE))
            while len(late.book.ratings) < 3:
                await asyncio.sleep(0.01)
            assert early.status == "superseded" and not early.failed.done() and len(early.book.ratings) == 1
            user = PurgeUser(user="nobody")
            subject = subjects.RPC.at(service="feedback", method="purge")
            assert (await (await product.bus("gateway")).request(subject, user, timeout=60.0)).ok  # type: ignore[attr-defined]
    assert not late.failed.done()
