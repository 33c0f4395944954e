"""One evaluation: its attempts, the attempts that are still to be issued, and its result.

The suite's tasks form groups of up to eight, one slot per task, so that group isolation puts eight tasks into one VM.
Everything follows from the request and the run state, so a successor continues where its predecessor stopped.
"""

from collections.abc import Iterator, Sequence

from headrace.ledger.requests import RequestSettings
from headrace.ledger.seeds import seed_of
from headrace.ledger.state import Attempt, RunState
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import token
from headrace.messages.tasks import TaskRef

GROUP = 8
"""Largest number of tasks of a group."""
ATTEMPTS = 3
"""Attempts of a slot before it counts as an infrastructure failure."""


def group_prefix(request: str) -> str:
    """The common part of the group names of an evaluation. request: its id."""
    return f"e{token(request)}"


class Evaluation:
    """One EvalRequest, its tasks, and the run state that holds its attempts."""

    def __init__(self, request: EvalRequest, asked_at: float, ids: Sequence[str], state: RunState) -> None:
        """asked_at: seconds since the epoch. ids: the tasks to run, in order."""
        self.request, self.asked_at, self.ids, self._state = request, asked_at, ids, state
        self.name = group_prefix(request.id)

    def groups(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Every group's name with the ids of its tasks, in slot order."""
        for number, first in enumerate(range(0, len(self.ids), GROUP)):
            yield f"{self.name}-{number:06d}", self.ids[first : first + GROUP]

    def last(self, group: str, slot: int) -> Attempt | None:
        """The newest attempt of a slot, which is the one that counts."""
        entry = self._state.groups.get(group)
        return entry.slots[slot].last if entry is not None and slot in entry.slots else None

    def to_issue(self) -> Iterator[SlotIssued]:
        """The attempts to issue now: of slots without one, and of failed slots that have attempts left."""
        for number, (group, tasks) in enumerate(self.groups()):
            for slot, task in enumerate(tasks):
                last = self.last(group, slot)
                if last is None or (last.failed and last.score is None and not last.final(ATTEMPTS)):
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
        """The attempts that were issued and have not ended."""
        for group, tasks in self.groups():
            for slot in range(len(tasks)):
                last = self.last(group, slot)
                if last is not None and last.score is None and not last.failed:
                    yield last.issued

    def rollout_request(self, issued: SlotIssued) -> RolloutRequest:
        """The RolloutRequest of a recorded attempt, the same one at every call."""
        asked = self.request
        settings = RequestSettings(
            sampling=asked.sampling,
            limits=asked.limits,
            isolation=asked.isolation,
            policy=asked.policy,
            harnesses=asked.harnesses or (),
        )
        return settings.request(issued)

    def result(self, now: float) -> EvalResult | None:
        """The result once every slot is scored or out of attempts, None before. now: seconds since the epoch."""
        families: dict[str, tuple[int, int]] = {}
        passes: dict[str, bool] = {}
        passed = infra = 0
        version = self.request.policy.version if self.request.policy.kind == "pinned" else -1
        for group, tasks in self.groups():
            for slot in range(len(tasks)):
                last = self.last(group, slot)
                if last is None or (last.score is None and not last.final(ATTEMPTS)):
                    return None
                if last.score is None:
                    infra += 1
                    continue
                family_passed, family_scored = families.get(last.score.family, (0, 0))
                families[last.score.family] = (family_passed + last.score.passed, family_scored + 1)
                passed += last.score.passed
                passes[tasks[slot]] = last.score.passed
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
            passes=passes,
            families=dict(sorted(families.items())),
            reason=self.request.reason,
            seconds=round(now - self.asked_at, 3),
        )
