"""Runs a product with simulated users until a number of sessions is served, and reads the records of it."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anyio

from benchmarks.feedback.probability import Behaviour, behaviour
from benchmarks.feedback.world import RUN, Product, Taught, Users, configuration, product
from headrace.config import Feedback, Gate
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.product import FeedbackSettled, GateVerdict, Promotion
from headrace.messages.subjects import EVENT, FATE, FEEDBACK, STEP, WEIGHT_HEAD
from headrace.messages.training import StepDone
from headrace.messages.weights import WeightHead
from headrace.replay.audit import prove

AT_ONCE = 12


class Served(NamedTuple):
    """One session: its user, its rating and the agent's behaviour."""

    tested: bool
    said: str


Judge = Callable[[str, Served, random.Random], bool]
"""Maps user and session to a rating."""
Visits = Callable[[int, random.Random], str]
"""The user of a session, by its number."""


class Outcome(NamedTuple):
    """The result of one run of the loop."""

    served: list[Served]
    """In order."""
    figures: dict[str, float]
    faults: list[str]
    first: Behaviour
    """The first version's own probabilities."""
    last: Behaviour
    """Those of the version that the run promoted last; the first version's where none was promoted."""


class Open:
    """Counts the ratings that have no end yet, so that users wait while the trainer is behind them.

    Real ratings come over hours and a step takes seconds. Without the wait most of the ratings of a short simulation
    are too late for the branch, and an attack by many ratings would fail for lack of time.
    """

    def __init__(self, most: int) -> None:
        """most: ratings without an end above which users wait; 0 for no limit."""
        self._most, self._open = most, 0
        self._changed = asyncio.Condition()

    async def given(self, count: int) -> None:
        """Add ratings; return when the number without an end is small enough for more."""
        async with self._changed:
            self._open += count
            await self._changed.wait_for(lambda: not self._most or self._open <= self._most)

    async def follow(self, running: Product) -> None:
        """Take away each rating whose end is recorded."""
        async for received in running.bus.follow("HR_FEEDBACK", FATE.where(run=RUN)):
            if isinstance(received.message, FeedbackSettled):
                async with self._changed:
                    self._open -= 1
                    self._changed.notify_all()


async def run(
    folder: Path,
    seed: int,
    sessions: int,
    feedback: Feedback,
    gate: Gate,
    taught: Taught,
    visits: Visits,
    judge: Judge,
    *,
    open_ratings: int = 0,
) -> Outcome:
    """Serve a number of sessions and rate each; then audit the streams. open_ratings: as in `Open`."""
    config = configuration(folder, seed, feedback, gate, taught)
    rng, served = random.Random(seed), list[Served]()
    started = time.monotonic()
    waiting = Open(open_ratings)
    async with product(folder, config, taught) as running, Users.of(running) as users:
        up = time.monotonic() - started
        async with anyio.create_task_group() as group:
            group.start_soon(waiting.follow, running)
            while len(served) < sessions:
                names = [visits(len(served) + place, rng) for place in range(min(AT_ONCE, sessions - len(served)))]
                tasks = [_visit(users, name, len(served) + place, rng, judge) for place, name in enumerate(names)]
                served += await asyncio.gather(*tasks)
                running.check()
                await waiting.given(len(names))
            group.cancel_scope.cancel()
        figures = {"prepare_s": up, "serve_s": time.monotonic() - started - up} | await _stages(running)
        report, faults = await prove(running.bus, RUN)
        assert report.feedback is not None
        figures |= {f"ratings_{end}": float(count) for end, count in report.feedback.ends.items()}
        figures["ratings_received"] = float(report.feedback.received)
        first = await behaviour(running.bus, config, RUN, 0, RUN)
        promoted = await _last_promoted(running)
        last = first if promoted < 0 else await behaviour(running.bus, config, running.branch, promoted, RUN)
    return Outcome(served, figures, faults, first, last)


async def _last_promoted(running: Product) -> int:
    """The branch's version that is promoted; -1 where none was."""
    promoted = -1
    async for received in running.bus.history("HR_EVENT", EVENT.where(run=RUN, actor="feedback")):
        if isinstance(received.message, Promotion) and received.message.branch:
            promoted = received.message.version
    return promoted


async def _visit(users: Users, name: str, number: int, rng: random.Random, judge: Judge) -> Served:
    session, tested, said = await users.session(name, number)
    seen = Served(tested, said)
    await users.rate(session, judge(name, seen, rng))
    return seen


async def _stages(running: Product) -> dict[str, float]:
    """Median seconds between the records from a rating to a promoted version, and whether the steps are exact."""
    bus, branch = running.bus, running.branch
    given: dict[int, float] = {}
    closed: dict[str, tuple[float, float]] = {}
    async for received in bus.history("HR_FEEDBACK", FEEDBACK.where(), FATE.where(run=RUN)):
        message = received.message
        if isinstance(message, UserFeedback):
            given[received.seq] = received.time
        elif isinstance(message, FeedbackSettled) and message.group:
            closed[message.group] = (given[message.feedback_seq], received.time)
    steps = [
        (r.time, r.message)
        async for r in bus.history("HR_STEP", STEP.at(run=branch))
        if isinstance(r.message, StepDone)
    ]
    heads = {
        r.message.version: r.time
        async for r in bus.history("HR_WEIGHTS", WEIGHT_HEAD.at(run=branch))
        if isinstance(r.message, WeightHead)
    }
    begun, promoted, verdicts = dict[int, float](), dict[int, float](), list[GateVerdict]()
    async for received in bus.history("HR_EVENT", EVENT.where(run=RUN, actor="feedback")):
        message = received.message
        if isinstance(message, GateVerdict):
            verdicts.append(message)
            begun.setdefault(message.candidate.version, received.time)
        elif isinstance(message, Promotion) and message.branch:
            promoted[message.version] = received.time
    waits: dict[str, list[float]] = {"thumb_to_batch": [], "batch_to_step": [], "thumb_to_promoted": []}
    for at, done in steps:
        for group in done.groups:
            if group not in closed:  # of the last step, whose ratings get their ends at this moment
                continue
            waits["thumb_to_batch"].append(closed[group][1] - closed[group][0])
            waits["batch_to_step"].append(at - closed[group][1])
            if done.version in promoted:
                waits["thumb_to_promoted"].append(promoted[done.version] - closed[group][0])
    waits["step_to_published"] = [heads[done.version] - at for at, done in steps if done.version in heads]
    waits["published_to_gate"] = [begun[version] - heads[version] for version in begun if version in heads]
    waits["gate_to_promoted"] = [promoted[version] - begun[version] for version in promoted if version in begun]
    ends = [verdict.stage for verdict in verdicts]
    return {
        **{f"{name}_s": median(values) if values else -1.0 for name, values in waits.items()},
        "steps": float(len(steps)),
        "promoted_versions": float(len(promoted)),
        "held_versions": float(ends.count("held")),
        "rolled_back_versions": float(ends.count("rolled_back")),
        "mismatch_max": max((done.max_abs_dlp for _, done in steps), default=-1.0),
        "exact_steps": float(sum(done.exact for _, done in steps)),
    }
