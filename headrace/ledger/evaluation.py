"""One evaluation as the streams tell it: which slots there are, what is missing, and the result.

A suite's tasks are cut into groups of up to eight, a slot per task, so that group isolation puts eight of them into one
VM. Everything follows from the request and the book: a successor goes on where its predecessor stopped.
"""

from collections.abc import Iterator, Sequence

from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import RolloutRequest, Sampling
from headrace.messages.subjects import token
from headrace.messages.tasks import TaskRef
from headrace.replay.books import Attempt, Book
from headrace.replay.seeds import seed_of

GROUP = 8
"""Tasks of one group."""
ATTEMPTS = 3
"""Attempts of a slot before it counts as a failure of infrastructure."""


class Evaluation:
    """One EvalRequest, its tasks, and its part of the run's book."""

    def __init__(self, request: EvalRequest, asked_at: float, ids: Sequence[str], book: Book) -> None:
        """asked_at: seconds since the epoch. ids: the tasks to run, in order."""
        self.request, self.asked_at, self.ids, self._book = request, asked_at, ids, book
        self._name = f"e{token(request.id)}"

    def groups(self) -> Iterator[tuple[str, Sequence[str]]]:
        """(group, its tasks by slot)."""
        for number, first in enumerate(range(0, len(self.ids), GROUP)):
            yield f"{self._name}-{number:06d}", self.ids[first : first + GROUP]

    def last(self, group: str, slot: int) -> Attempt | None:
        """The attempt of a slot that counts."""
        found = self._book.groups.get(group)
        return found.slots[slot].last if found is not None and slot in found.slots else None

    def wanted(self) -> Iterator[SlotIssued]:
        """Attempts to issue now: slots that have none, and failed ones that may be tried again."""
        for number, (group, tasks) in enumerate(self.groups()):
            for slot, task in enumerate(tasks):
                last = self.last(group, slot)
                if last is None or (last.failed and last.score is None and last.number + 1 < ATTEMPTS):
                    attempt = 0 if last is None else last.number + 1
                    yield SlotIssued(
                        run=self.request.run,
                        lane="eval",
                        group=group,
                        index=number,
                        slot=slot,
                        attempt=attempt,
                        group_size=len(tasks),
                        task=TaskRef(self.request.suite, task),
                        seed=seed_of(self.request.seed, self.request.id, task, attempt),
                        min_version=0,
                    )

    def running(self) -> Iterator[SlotIssued]:
        """Attempts that were issued and have not ended."""
        for group, tasks in self.groups():
            for slot in range(len(tasks)):
                last = self.last(group, slot)
                if last is not None and last.score is None and not last.failed:
                    yield last.issued

    def rollout(self, issued: SlotIssued) -> RolloutRequest:
        """The request of a recorded attempt."""
        ask = self.request
        return RolloutRequest(
            run=issued.run,
            lane="eval",
            group=issued.group,
            slot=issued.slot,
            attempt=issued.attempt,
            task=issued.task,
            seed=issued.seed,
            policy=ask.policy,
            sampling=Sampling(
                temperature=ask.sampling.temperature, max_turn_tokens=ask.sampling.max_turn_tokens, seed=issued.seed
            ),
            limits=ask.limits,
            isolation=ask.isolation,
        )

    def result(self, now: float) -> EvalResult | None:
        """The outcome once every slot is scored or given up; None before. now: seconds since the epoch."""
        families: dict[str, tuple[int, int]] = {}
        passed = infra = 0
        version = self.request.policy.version if self.request.policy.kind == "pinned" else -1
        for group, tasks in self.groups():
            for slot in range(len(tasks)):
                last = self.last(group, slot)
                if last is None or (last.score is None and not (last.failed and last.number + 1 >= ATTEMPTS)):
                    return None
                if last.score is None:
                    infra += 1
                    continue
                good, all_ = families.get(last.score.family, (0, 0))
                families[last.score.family] = (good + last.score.passed, all_ + 1)
                passed += last.score.passed
                if self.request.policy.kind == "latest":
                    version = max(version, last.score.oldest_version)
        scored = len(self.ids) - infra
        return EvalResult(
            id=self.request.id,
            run=self.request.run,
            suite=self.request.suite,
            policy=self.request.policy,
            version=version,
            tasks=len(self.ids),
            passed=passed,
            rate=passed / scored if scored else 0.0,
            infra_failures=infra,
            families=dict(sorted(families.items())),
            reason=self.request.reason,
            seconds=round(now - self.asked_at, 3),
        )
