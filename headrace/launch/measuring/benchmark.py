"""`headrace eval`: measures one policy, or two on the same tasks, several trials per task, and writes report and card.

Each trial is an evaluation. The figures are read from the run's streams and compared with the evaluator's results and
with the stored scores. A report that differs from them is not written.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.bench.attempts import measure
from headrace.bench.report import Comparison, Report, compare, report
from headrace.bench.requests import requests, shares, trial_id
from headrace.bus.errors import MessageGone
from headrace.config import Config, load
from headrace.dashboard.card import card
from headrace.launch import runs
from headrace.launch.measuring.evaluation import (
    Measurement,
    ask,
    first_request,
    open_run,
    policy_of,
    prepare,
    require_suite,
    serve,
)
from headrace.launch.output import say, say_report
from headrace.launch.runs import RunDir, RunError
from headrace.launch.session import bus_of
from headrace.launch.supervision.signals import Stopping, interruptible
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT

if TYPE_CHECKING:
    from headrace.bus.connection import Bus

Again = Callable[[Config], Callable[[Trajectory, Score], Awaitable[Score]]]
"""Makes the judge that judges a recorded score again from its recorded outcomes."""
FOLDER = "bench"
"""Subfolder of the run's folder, for reports and cards."""


class WantedBenchmark(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark as the command line names it."""

    policies: tuple[str, ...]
    """One, or two: the second is compared with the first. A policy as `headrace eval` names it, or the report of an
    earlier benchmark (a path that ends in .json)."""
    suite: str
    tasks: int = 0
    trials: int = 5
    temperature: float = 1.0


async def benchmark(config: Config, wanted: WantedBenchmark, again: Again) -> int:
    """Measure, write report and card, print one JSON line per policy and one for the comparison; 1 when trials are
    without a verdict."""
    require_suite(config, wanted.suite)
    for policy in wanted.policies:
        if not policy.endswith(".json"):
            policy_of(policy)

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        reports: list[Report] = []
        for policy in wanted.policies:
            reports.append(stored(policy) if policy.endswith(".json") else await one(policy, stopping, closing))
        comparison = _compared(reports)
        if comparison is not None:
            say_report(comparison)
            write_card(runs.find(reports[-1].run, Path(config.run.dir)), reports, comparison)
        return 1 if any(report.infra_lost for report in reports) else 0

    async def one(policy: str, stopping: Stopping, closing: AsyncExitStack) -> Report:
        async with AsyncExitStack() as processes:
            await prepare(config, processes)
            named = policy_of(policy)
            run = open_run(config, named, stopping, processes)
            stopping.effect = (
                f"the benchmark in run {run.folder.id} ends unfinished; its records stay in {run.folder.path}/"
            )
            ref = await serve(run, named, processes)
            id = time.strftime("bench%Y%m%d-%H%M%S")
            asked = Measurement(policy=policy, suite=wanted.suite, tasks=wanted.tasks, temperature=wanted.temperature)
            await ask(run, requests(first_request(run, asked, ref, id, f"bench {policy}"), wanted.trials))
        return await recompute(run.folder, id, again)

    return await interruptible(body)


async def recomputed(run: str, root: Path, id: str, again: Again) -> int:
    """The report of a benchmark that was made before, from the run's streams; 1 when the stored report differs."""
    folder = runs.find(run, root)
    path = folder.path / FOLDER / f"{id}.json"
    if not path.is_file():
        ids = sorted(each.stem for each in (folder.path / FOLDER).glob("*.json"))
        raise RunError(f"run {folder.id} has no benchmark {id!r}; it has {', '.join(ids) or 'none'}")
    before = stored(str(path))
    await recompute(folder, id, again)
    equal = stored(str(path)) == before
    say("the report is equal" if equal else "the report DIFFERS from the stored one")
    return 0 if equal else 1


async def recompute(folder: RunDir, id: str, again: Again) -> Report:
    """Read the streams, check them, write report and card, and print the figures without their rows."""
    async with bus_of(folder, "replay") as bus:
        trials, results = await _trials(bus, folder.id, id)
        measured = await measure(bus, trials)
        made = report(id, folder.id, trials[0].reason.removeprefix("bench "), trials[0].suite, len(trials), measured)
        wrong = [*_against_results(made, results), *await _against_scores(bus, folder, made, again)]
    if wrong:
        raise RunError(f"benchmark {id} differs from its streams: {'; '.join(wrong[:3])}", 1)
    path = folder.path / FOLDER / f"{id}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_encoded(made))
    say_report(msgspec.structs.replace(made, rows=(), shares={}))
    write_card(folder, [made], None)
    return made


def write_card(folder: RunDir, reports: list[Report], comparison: Comparison | None) -> None:
    """Write the page beside the newest report, and say where."""
    name = reports[-1].id if comparison is None else f"{reports[-1].id}-against-{reports[0].id}"
    path = folder.path / FOLDER / f"{name}.html"
    path.write_text(card(reports, comparison), encoding="utf-8")
    say(f"card: {path}")


def stored(path: str) -> Report:
    """The report of an earlier benchmark. RunError when the file is none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not the report of a benchmark: {error}") from None


def _encoded(made: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(made))


def _compared(reports: Sequence[Report]) -> Comparison | None:
    if len(reports) < 2:
        return None
    return compare(reports[0], reports[1])


async def _trials(bus: "Bus", run: str, id: str) -> tuple[list[EvalRequest], list[EvalResult]]:
    """The benchmark's evaluations in order, with their results. RunError when they are not all there."""
    asked: dict[str, EvalRequest] = {}
    done: dict[str, EvalResult] = {}
    for actor, type in (("operator", "eval_request"), ("evaluator", "eval_result")):
        async for received in bus.history("HR_EVENT", EVENT.where(run=run, actor=actor, type=type)):
            if isinstance(message := received.message, EvalRequest):
                asked[message.id] = message
            elif isinstance(message, EvalResult):
                done[message.id] = message
    ids = [id]
    while trial_id(id, len(ids)) in asked:
        ids.append(trial_id(id, len(ids)))
    if any(each not in asked or each not in done for each in ids):
        raise RunError(f"benchmark {id} has not ended in run {run}, or its records are purged (events: 14 days)", 1)
    return [asked[each] for each in ids], [done[each] for each in ids]


def _against_results(made: Report, results: Sequence[EvalResult]) -> list[str]:
    """A sentence per figure that differs from the evaluator's count."""
    wrong = []
    if made.shares != shares(results):
        wrong.append("the evaluator's passes differ from those of the scores")
    if made.infra_lost != sum(result.infra_failures for result in results):
        wrong.append("the evaluator counted other infrastructure failures")
    return wrong


async def _against_scores(bus: "Bus", folder: RunDir, made: Report, again: Again) -> list[str]:
    """A sentence per score whose verdict or reward changes when it is computed again from the recorded outcomes."""
    judge = again(load(folder.config))
    wrong: list[str] = []
    for row in made.rows:
        try:
            trajectory = (await bus.get("HR_TRAJ", row.trajectory_seq)).message
            score = (await bus.get("HR_SCORE", row.score_seq)).message
        except MessageGone:
            trajectory = score = None
        if not isinstance(trajectory, Trajectory) or not isinstance(score, Score):
            wrong.append(f"task {row.task}: its trajectory or score is purged")
            continue
        new = await judge(trajectory, score)
        if (new.verdict, new.reward) != (score.verdict, score.reward):
            wrong.append(f"task {row.task}: {score.verdict} {score.reward} is now {new.verdict} {new.reward}")
    return wrong
