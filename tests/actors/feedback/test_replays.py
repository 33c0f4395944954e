"""The baseline of a rated session from attempts at its task; the test answers in place of the evaluator."""

import asyncio
from pathlib import Path

import pytest

from headrace.actors.feedback import replays
from headrace.actors.feedback.actor import Feedback
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest
from headrace.messages.judging import Score
from headrace.messages.tasks import TaskRef
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.product import BASE, Product, settings

pytestmark = pytest.mark.anyio
TASK = TaskRef("generated/heldout", "3")


@pytest.fixture
def product(connect: Connect, tmp_path: Path) -> Product:
    return Product(connect, tmp_path)


async def replay(product: Product, seed: int, passed: bool) -> EvalRequest:
    """Answer one attempt of a replay."""

    def wanted(message: Message) -> bool:
        return isinstance(message, EvalRequest) and message.reason == "replay" and message.seed == seed

    request = await product.event(wanted)
    assert isinstance(request, EvalRequest)
    await product.evaluated(request, {TASK.task: passed})
    return request


async def test_the_baseline_of_a_session_is_the_pass_rate_of_its_replays(product: Product, connect: Connect) -> None:
    """Its batch waits for them, also over a restart; a client's session beside it waits for nothing."""
    config = settings(product.folder, baseline="replay", replays=4, user_cap=0)
    async with asyncio.timeout(120):
        async with living(Feedback, config, await connect("feedback"), product.run) as actor:
            await product.opened()
            rated = await product.session(BASE, task=TASK)
            await product.rate(rated, "up")
            await product.rate(await product.session(BASE), "down")
            request = await replay(product, 0, False)
            await replay(product, 1, True)
            while len(actor.book.ratings) < 2 or len(actor.replays._results) < 2:
                await asyncio.sleep(0.01)
            async with actor._one_at_a_time:
                assert not actor.branch.state.closings
        async with living(Feedback, config, await connect("feedback"), product.run):
            await replay(product, 2, False)
            await replay(product, 3, False)
            await product.said("batch_closed")
    assert (request.suite, request.ids, request.policy, request.tasks) == (TASK.suite, ("3",), BASE, 1)
    assert "ab12" not in request.id, "a purge does not search evaluations, so they do not name the user"
    bus = await connect("replay")
    records = [received.message async for received in bus.history("HR_SCORE", subjects.SCORE.where(run=product.branch))]
    scores = {record.group: record for record in records if isinstance(record, Score)}
    assert scores.pop(rated.rsplit("-", 2)[0]).baseline == 0.25
    assert [score.baseline for score in scores.values()] == [None]


async def test_a_session_without_hidden_tests_or_answers_has_the_class_baseline(
    product: Product, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "REPLAY_S", 0.05)
    config = settings(product.folder, baseline="replay", user_cap=0)
    async with asyncio.timeout(120), living(Feedback, config, await connect("feedback"), product.run):
        await product.opened()
        await product.rate(await product.session(BASE, task=TASK, altered=True))
        await product.rate(await product.session(BASE, task=TASK))  # nobody answers for it
        await product.said("batch_closed")
    bus = await connect("replay")
    records = [received.message async for received in bus.history("HR_SCORE", subjects.SCORE.where(run=product.branch))]
    assert [record.baseline for record in records if isinstance(record, Score)] == [None, None]
    events = subjects.EVENT.where(run=product.run, actor="feedback", type="eval_request")
    asked = [received.message async for received in bus.history("HR_EVENT", events)]
    assert len(asked) == 4, "the altered one was not asked for"
