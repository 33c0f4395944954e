"""A benchmark over a real broker and evaluator: what the streams say equals what the evaluator says."""

import asyncio
from secrets import token_hex

import pytest
from msgspec import UNSET

from headrace.actors.evaluator import Evaluator
from headrace.bench.attempts import measure
from headrace.bench.report import NotComparable, Report, compare, report
from headrace.bench.requests import requests, shares
from headrace.config import Config
from headrace.dashboard.card import card
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Agreement, CriterionScore, RubricScore
from headrace.messages.rollout import PolicyRef, RolloutRequest, TokenKinds
from headrace.messages.subjects import EVENT
from tests.conftest import Connect
from tests.support import mutations
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S
from tests.support.records import of

pytestmark = pytest.mark.anyio
TASKS, TRIALS = 10, 3
AGREEMENT = Agreement(kappa=0.71, low=0.6, high=0.8, pairs=40)
RUBRIC = of(
    RubricScore,
    rubric="practices",
    value=0.5,
    criteria=(
        CriterionScore(id="scope", weight=1.0, met=0.5, agreement=AGREEMENT),
        CriterionScore(id="brief", weight=0.0, met=1.0),
    ),
)
"""The answers about every attempt; the second criterion is on no card."""


async def measured(connect: Connect, unlucky: str, good: int, uncounted: int = 0) -> tuple[Report, list[EvalResult]]:
    """Three trials of ten tasks: the first `good` pass always, the next in the first trial only. One attempt at
    `unlucky` fails in trial 0, and all of them in trial 1. Attempts at the first `uncounted` tasks do not count their
    tokens by kind."""
    other = FakeWorkers(await connect(), f"r{token_hex(4)}", groups_per_step=1)
    other.rubric = RUBRIC
    await other.start()

    async def answer(request: RolloutRequest) -> None:
        trial = int(request.group.split("-")[1][1:]) if "-t" in request.group else 0
        if request.task.task == unlucky and (trial == 1 or (trial == 0 and request.attempt == 0)):
            await other.fail(request, "sandbox_lost")
            return
        place = int(request.task.task)
        kinds = TokenKinds(thinking=2, calls=1) if place >= uncounted else UNSET
        await other.solve(request, passed=place < good or (place == good and trial == 0), kinds=kinds)

    other.answer = answer
    first = EvalRequest(
        id="bench1", run=other.run, suite="generated/heldout", tasks=TASKS, policy=PolicyRef("pinned", 2)
    )
    trials = requests(first, TRIALS)
    async with living(Evaluator, Config(), await connect("evaluator"), other.run):
        for request in trials:
            await other.bus.publish(EVENT.at(run=other.run, actor="operator", type="eval_request"), request)
        results: dict[str, EvalResult] = {}
        async with asyncio.timeout(PATIENCE_S):
            where = EVENT.where(run=other.run, actor="evaluator", type="eval_result")
            async for received in other.bus.follow("HR_EVENT", where):
                results[received.message.id] = received.message
                if len(results) == TRIALS:
                    break

    async def read() -> Report:
        return report("bench1", other.run, f"{other.run}:2", first.suite, TRIALS, await measure(other.bus, trials))

    made = await read()
    if unlucky:
        assert await mutations.pollute(other.bus, other.run) > 300
        assert await read() == made, "records that nobody can read change nothing"
    await other.stop()
    return made, [results[request.id] for request in trials]


async def test_the_report_follows_from_the_streams_and_infrastructure_stands_apart(connect: Connect) -> None:
    unlucky = str(TASKS - 1)
    made, results = await measured(connect, unlucky, good=4)
    assert made.shares == shares(results)
    assert (made.tasks, made.trials, made.attempts) == (TASKS, TRIALS, TASKS * TRIALS - 1)
    assert (made.infra_lost, made.infra_failures) == (1, 4), "one trial after three attempts, and one attempt beside it"
    assert made.infra_lost == sum(result.infra_failures for result in results)
    assert {failure.task for failure in made.failures} == {unlucky}
    assert made.pass_1.mean == pytest.approx((4 + 1 / 3) / TASKS) and made.pass_1.tasks == TASKS
    assert made.pass_k.mean == pytest.approx(4 / 9), "the task without all of its trials is left out"
    assert made.sampled_tokens_per_pass == pytest.approx(3 * made.attempts / 13)
    means = made.means
    assert (means.acting_tokens, means.thinking_tokens, means.call_tokens, means.text_tokens) == (3.0, 2.0, 1.0, 0.0)
    assert 'thinking, calls, text<td class="number">2, 1, 0' in card([made], None)
    assert made.silent >= 0.95
    assert made.adherence == {"scope": 0.5, "brief": 1.0} and made.agreements == {"scope": AGREEMENT}
    assert "brief 1.00 (not measured), scope 0.50 (0.71 [0.60, 0.80])" in card([made], None)


async def test_two_policies_are_compared_task_by_task(connect: Connect) -> None:
    worse, _ = await measured(connect, "", good=0)
    better, _ = await measured(connect, "", good=9, uncounted=1)
    comparison = compare(worse, better)
    assert (comparison.finding, comparison.pass_1.won, comparison.pass_1.lost) == ("better", 10, 0)
    assert comparison.pass_1.mean == pytest.approx(9.3333 / 10 - 0.3333 / 10, abs=1e-3)
    assert compare(better, better).finding == "not distinguishable"
    page = card([worse, better], comparison)
    assert "pass^3" in page and "better" in page and page.count("<h2>") == 3 and "<script" not in page
    means = better.means
    assert (means.acting_tokens, means.thinking_tokens, means.call_tokens, means.text_tokens) == (3.0, None, None, None)
    assert f"not counted in {TRIALS} of {TASKS * TRIALS} attempts" in page, (
        "the mean of the others is not given for all"
    )
    other = Report(**{name: getattr(better, name) for name in Report.__struct_fields__} | {"suite": "other/suite"})
    with pytest.raises(NotComparable, match="the suites differ"):
        compare(worse, other)
