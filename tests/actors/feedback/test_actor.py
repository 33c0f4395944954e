"""The feedback actor over a real broker: each rating ends once, batches are closed, candidates pass the gate."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.feedback.actor import Feedback
from headrace.actors.gateway import Gateway
from headrace.config import Config, branch_config
from headrace.config import Feedback as FeedbackSection
from headrace.config import Gate as GateSection
from headrace.gateway.tenants.store import make_secrets
from headrace.messages import subjects
from headrace.messages.evaluation import EvalRequest
from headrace.messages.ledger import GroupClosed
from headrace.messages.product import (
    Promotion,
    PurgeCertificate,
    PurgeUser,
    ShadowTurn,
)
from headrace.messages.rollout import PolicyRef
from headrace.replay.audit import prove
from headrace.replay.feedback import feedback_books
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.product import BASE, Product, settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def product(connect: Connect, tmp_path: Path) -> Product:
    return Product(connect, tmp_path)


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


async def test_a_batch_has_the_numbers_that_programs_gave(product: Product, connect: Connect) -> None:
    """And the thumb where the user gave one, whichever came first."""
    config = settings(product.folder, user_cap=0)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run):
        await product.opened()
        first = await product.session(BASE)
        await product.rate(first, "down")
        await product.rate(first, "up", signal="reward", reward=0.75)
        await product.rate(await product.session(BASE), "down", signal="reward", reward=0.25)
        await product.said("batch_closed")
    history = (await connect("replay")).history("HR_SCORE", subjects.CLOSE.where(run=product.branch))
    closings = [received.message async for received in history]
    assert [each.slots[0].reward for each in closings if isinstance(each, GroupClosed)] == [0.0, 0.25]


async def test_a_provisional_outcome_waits_for_the_final_one(product: Product, connect: Connect) -> None:
    early: dict[str, Any] = {"signal": "persistence", "final": False, "at": "10m"}
    final: dict[str, Any] = {"signal": "persistence", "at": "24h"}
    waiting = settings(product.folder, user_cap=0, settle_s=3600.0)
    async with asyncio.timeout(120):
        async with living(Feedback, waiting, await connect("feedback"), product.run) as actor:
            await product.opened()
            first, second = await product.session(BASE), await product.session(BASE)
            await product.rate(first, "up", **early)
            await product.rate(second, "up", **early)
            await product.rate(await product.session(BASE), "down")
            await product.rate(first, "down", **final)  # closes the batch: the second one has no final outcome
            await product.said("batch_closed")
            ends = actor.book.ends({})
            assert (ends["superseded"], ends["pending"], len(actor.book.waiting)) == (1, 3, 1)
        at_once = settings(product.folder, user_cap=0)
        async with living(Feedback, at_once, await connect("feedback"), product.run) as actor:
            await product.rate(await product.session(BASE), "up")  # closes a batch with the provisional outcome
            while len(actor.branch.state.closings) < 4:
                await asyncio.sleep(0.01)
            await product.rate(second, "down", **final)
            while actor.book.ends({})["late"] < 1:
                await asyncio.sleep(0.01)
    admin = await connect("admin")
    fates = [received.message async for received in admin.history("HR_FEEDBACK", subjects.FATE.where(run=product.run))]
    assert [each.detail for each in fates if each.fate == "late"] == [
        "its session has a place in a batch already, with its provisional outcome"
    ]
    closings = [r.message async for r in admin.history("HR_SCORE", subjects.CLOSE.where(run=product.branch))]
    assert [each.slots[0].reward for each in closings if isinstance(each, GroupClosed)] == [0.0, 0.0, 1.0, 1.0]
    report, _, faults = await feedback_books(admin, product.run)
    assert report is not None and faults == [] and report.received == 6 == sum(report.ends.values())


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
    # The audit finds a closing without a rating.
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


async def test_a_candidate_goes_through_benchmark_shadow_and_canary(product: Product, connect: Connect) -> None:
    """The actor is killed during a stage: the stage and its counts are kept."""
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
        # The receiver of the branch keeps the promoted version, although it reads only its own run's events.
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
    await product.evaluated(request, {str(task): task < passed for task in range(20)})


async def test_an_operators_promotion_reaches_new_sessions_and_ends_the_candidate(
    product: Product, connect: Connect
) -> None:
    """A promotion of an earlier version is accepted too; one of a version that was never published is refused."""
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
            while gateway.split.promoted != PolicyRef("pinned", 2):  # read again from HR_PRODUCT
                await asyncio.sleep(0.01)


async def test_a_rollback_reaches_every_gateway_within_thirty_seconds(product: Product, connect: Connect) -> None:
    """A rollback is a promotion of the version before; three gateways assign it to every new session."""
    config, later = settings(product.folder), PolicyRef("pinned", 2)
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        await stack.enter_async_context(living(Feedback, config, await connect("feedback"), product.run))
        gateways = [
            await stack.enter_async_context(living(Gateway, config, await connect("gateway"), product.run))
            for _ in range(3)
        ]
        await product.opened()
        for version, policy in ((2, later), (7, BASE)):
            await product.promote(version)
            async with asyncio.timeout(30):
                while any(each.split.promoted != policy for each in gateways):
                    await asyncio.sleep(0.01)
            assert {each.split.policy(f"ab.{number}") for each in gateways for number in range(100)} == {policy}


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
            await make_secrets(await product.bus("operator"))
            user = PurgeUser(user="nobody")
            subject = subjects.RPC.at(service="feedback", caller="gateway", method="purge")
            answer = await (await product.bus("gateway")).request(subject, user, timeout=60.0)
            assert isinstance(answer, PurgeCertificate), answer
    assert not late.failed.done()
