"""What the curriculum asks for: which task, which seed, which evaluations. Pure, so that a successor asks the same.

The task order is a fresh permutation of the suite per pass, made from the run's seed; a group's place in it is its
ordinal, which the ledger holds. Nothing else is random, so there is no generator whose state could be lost.
"""

import random
from collections.abc import Iterator, Sequence

from headrace.config import Config
from headrace.messages import rollout
from headrace.messages.evaluation import EvalRequest
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import PolicyRef, RolloutRequest, Sampling
from headrace.messages.tasks import CANARY, TaskRef
from headrace.replay.seeds import seed_of

PASS = 4096
"""Tasks that are shuffled at once: a generated suite is far longer than any run."""


class TaskOrder:
    """Task of a group by the group's ordinal."""

    def __init__(self, ids: Sequence[str], seed: int) -> None:
        """`ids`: the suite's tasks in order; the first `PASS` blocks are walked one after the other, each shuffled."""
        if not len(ids):
            raise ValueError("a suite without tasks cannot be trained on")
        self._ids, self._seed = ids, seed
        self._pass = min(PASS, len(ids))
        self._made: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, number: int) -> str:
        """The task of group `number`."""
        block, at = divmod(number, self._pass)
        if self._made[0] != block:
            order = list(range(self._pass))
            random.Random(seed_of(self._seed, "order", block)).shuffle(order)
            self._made = (block, order)
        blocks = len(self._ids) // self._pass
        return self._ids[(block % blocks) * self._pass + self._made[1][at]]


def task(config: Config, order: TaskOrder, number: int) -> TaskRef:
    """The task of group `number`, now and then as a canary."""
    suite = config.tasks.suite
    if seed_of(config.run.seed, "canary", number) < config.curriculum.canaries * 2**62:
        suite = CANARY + suite
    return TaskRef(suite, order[number])


def limits(config: Config) -> rollout.Limits:
    """A request's limits from the configuration."""
    own = config.limits
    return rollout.Limits(
        max_turns=own.max_turns,
        max_tokens=own.max_tokens,
        context_tokens=own.context_tokens,
        wall_s=own.wall_s,
        max_parallel_calls=own.max_parallel_calls,
    )


def slot(
    config: Config,
    run: str,
    group: str,
    index: int,
    slot: int,
    attempt: int,
    task: TaskRef,
    min_version: int,
    beside: bool = False,
) -> SlotIssued:
    """The record of an attempt. A new attempt draws anew: the failed one may have failed for what it drew."""
    return SlotIssued(
        run=run,
        lane="train",
        group=group,
        index=index,
        slot=slot,
        attempt=attempt,
        group_size=config.curriculum.group_size,
        task=task,
        seed=seed_of(config.run.seed, group, slot, attempt),
        min_version=min_version,
        beside=beside,
    )


def request(config: Config, issued: SlotIssued) -> RolloutRequest:
    """The request of a recorded attempt, the same however often it is made."""
    return RolloutRequest(
        run=issued.run,
        lane=issued.lane,
        group=issued.group,
        slot=issued.slot,
        attempt=issued.attempt,
        task=issued.task,
        seed=issued.seed,
        min_version=issued.min_version,
        sampling=Sampling(
            temperature=config.curriculum.temperature,
            max_turn_tokens=config.limits.max_turn_tokens,
            seed=issued.seed,
        ),
        limits=limits(config),
        isolation=config.environment.isolation,
    )


def evaluations(config: Config, run: str, when: str, version: int) -> Iterator[EvalRequest]:
    """The evaluations before (`when` = ``before``) or after training, of one version, as configured."""
    own = config.evaluation
    suites = (("heldout", config.tasks.heldout, own.heldout_tasks), ("unseen", config.tasks.unseen, own.unseen_tasks))
    kinds = (("", 1.0),) if when == "before" else (("_t1", 1.0), ("_greedy", 0.0))
    for name, suite, tasks in suites:
        for kind, temperature in kinds:
            if tasks > 0:
                reason = f"{name}_{when}{kind}"
                yield EvalRequest(
                    id=reason.replace("_", "-"),
                    run=run,
                    suite=suite,
                    tasks=tasks,
                    policy=PolicyRef("pinned", version),
                    sampling=Sampling(temperature=temperature, max_turn_tokens=config.limits.max_turn_tokens),
                    limits=limits(config),
                    isolation=config.environment.isolation,
                    reason=reason,
                    seed=config.run.seed,
                )
