"""The curriculum's tasks, ledger records and evaluations. All functions are pure, so a successor gets the same results.

The task order is a permutation of the whole suite, derived from the run's seed, with a new one for every pass. A
group's position in it is the group's ordinal, which the ledger holds. Nothing else is random, so no generator state can
be lost.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from msgspec import UNSET

from headrace.config import Config
from headrace.ledger.requests import settings_of, with_harness
from headrace.ledger.schedule import IssueGroup, RetrySlot
from headrace.ledger.seeds import seed_of
from headrace.messages.evaluation import EvalRequest
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import PolicyRef
from headrace.messages.tasks import TaskRef

TEMPERATURE = 1.0
"""Sampling temperature of the measurements during training."""
ROUNDS_PER_BIT = 6
"""Rounds of the shuffle for each bit of the suite's size."""


class TaskOrder:
    """Task of a group by the group's ordinal: a pass is a permutation of all tasks.

    The swap-or-not shuffle (Hoang, Morris and Rogaway, CRYPTO 2012) finds one place of a permutation without the
    others, because a generated suite is far too long to be shuffled as a whole. In each round a place x and its
    partner (key - x) mod n are exchanged, or not, as a hash of the round and the larger of the two decides.
    """

    def __init__(self, ids: Sequence[str], seed: int, left_out: Collection[str] = ()) -> None:
        """ids: the suite's tasks in order. left_out: few of them, each replaced by another task at random."""
        if len(ids) <= len(left_out):
            raise ValueError("a suite without tasks cannot be trained on")
        self._ids, self._seed, self._left_out = ids, seed, left_out

    def __getitem__(self, number: int) -> str:
        """The task of group `number`."""
        walk, place = divmod(number, len(self._ids))
        id = self._ids[self._shuffled(place, walk)]
        again = itertools.count()
        while id in self._left_out:
            id = self._ids[self._shuffled(place, walk, next(again))]
        return id

    def _shuffled(self, place: int, *order: int) -> int:
        size = len(self._ids)
        for round in range(ROUNDS_PER_BIT * size.bit_length()):
            key = seed_of(self._seed, "order", *order, round)
            partner = (key - place) % size
            if seed_of(key, max(place, partner)) & 1:
                place = partner
        return place


def evaluated(config: Config) -> tuple[str, ...]:
    """The suites that measure the policy before, during and after training."""
    sizes, tasks = config.evaluation, config.tasks
    sides = ((tasks.heldout, sizes.heldout_tasks), (tasks.unseen, sizes.unseen_tasks))
    ends = [suite for suite, count in sides if count and (sizes.before or sizes.after)]
    return tuple(dict.fromkeys([*ends, *suites_during(config)]))


def task(config: Config, order: TaskOrder, number: int) -> TaskRef:
    """The task of group `number`."""
    return TaskRef(config.tasks.suite, order[number])


def slots_of(config: Config, run: str, decision: IssueGroup | RetrySlot, task: TaskRef, index: int) -> list[SlotIssued]:
    """The ledger records of a decision. index: the group's number, dropped groups not counted.

    A new attempt gets a new seed, because the previous one may have failed because of its seed.
    """
    if isinstance(decision, RetrySlot):
        attempts = [(decision.slot, decision.attempt)]
    else:
        attempts = [(slot, 0) for slot in decision.slots]
    return [
        SlotIssued(
            run=run,
            lane="train",
            group=decision.group,
            index=index,
            slot=slot,
            attempt=attempt,
            group_size=config.curriculum.group_size,
            task=task,
            seed=seed_of(config.run.seed, decision.group, slot, attempt),
            min_version=decision.min_version,
        )
        for slot, attempt in attempts
    ]


DURING = "during"
"""First part of the reason of an evaluation during training; a suite's name follows."""


def suites_during(config: Config) -> tuple[str, ...]:
    """The suites that are measured during training; empty if there are no such measurements."""
    return (config.evaluation.every_suites or (config.tasks.heldout,)) if config.evaluation.every else ()


def evaluation_ids(config: Config, steps: int) -> list[str]:
    """The id of every evaluation that is due after some of the first `steps` steps, in order."""
    due = range(config.evaluation.every, steps + 1, config.evaluation.every) if config.evaluation.every else ()
    return [f"step-{step}-{suite.replace('/', '-')}" for step in due for suite in suites_during(config)]


def evaluations_during(config: Config, run: str, steps: int, served: int) -> Iterator[EvalRequest]:
    """The evaluations of the newest multiple of `every` steps, once its version or a newer one is served.

    steps: steps done. served: the newest version that is served, which is the one measured: the sender skips versions
    when steps are short. A multiple that training passed before its version was served is not measured, because it
    would measure the same version again.
    """
    section = config.evaluation
    due = steps // section.every * section.every if section.every else 0
    if not 0 < due <= served:
        return
    settings = with_harness(config, settings_of(config, TEMPERATURE))
    ids = evaluation_ids(config, due)[-len(suites_during(config)) :]
    for id, suite in zip(ids, suites_during(config), strict=True):
        yield EvalRequest(
            id=id,
            run=run,
            suite=suite,
            tasks=section.every_tasks,
            policy=PolicyRef("pinned", served),
            sampling=settings.sampling,
            limits=settings.limits,
            isolation=settings.isolation,
            harnesses=settings.harnesses or UNSET,
            reason=f"{DURING}_{suite}",
            seed=config.run.seed,
        )


def evaluations(config: Config, run: str, when: Literal["before", "after"], version: int) -> Iterator[EvalRequest]:
    """The configured evaluations of one version, before or after training."""
    sizes = config.evaluation
    suites = (
        ("heldout", config.tasks.heldout, sizes.heldout_tasks),
        ("unseen", config.tasks.unseen, sizes.unseen_tasks),
    )
    kinds: tuple[tuple[str, float], ...] = (("_t1", 1.0), ("_greedy", 0.0))
    if when == "before":
        kinds = (("", 1.0), ("_greedy", 0.0)) if sizes.before_greedy else (("", 1.0),)
    for name, suite, tasks in suites:
        for kind, temperature in kinds:
            if tasks > 0:
                reason = f"{name}_{when}{kind}"
                settings = with_harness(config, settings_of(config, temperature))
                yield EvalRequest(
                    id=reason.replace("_", "-"),
                    run=run,
                    suite=suite,
                    tasks=tasks,
                    policy=PolicyRef("pinned", version),
                    sampling=settings.sampling,
                    limits=settings.limits,
                    isolation=settings.isolation,
                    harnesses=settings.harnesses or UNSET,
                    reason=reason,
                    seed=config.run.seed,
                )


def own_evaluations(config: Config, run: str) -> list[EvalRequest]:
    """The evaluations for whose results every run of this configuration waits: before and after training. Each
    request names version 0."""
    section = config.evaluation
    before = evaluations(config, run, "before", 0) if section.before else ()
    after = evaluations(config, run, "after", 0) if section.after else ()
    return [*before, *after]
