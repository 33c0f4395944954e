"""Reads a benchmark's attempts from the streams: the figures of each one, and those that infrastructure failed.

It reads ledger, failures, scores and trajectories, and not the evaluator's result. So a report that is made later is
equal, and it can be compared with the evaluator's result.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.bench.behaviour import acts_of
from headrace.bench.tokens import Tokens, tokens_of
from headrace.bus.connection import Bus
from headrace.ledger import lost_attempts
from headrace.ledger.evaluation import group_prefix
from headrace.messages.evaluation import EvalRequest
from headrace.messages.judging import Agreement, Score
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import SlotFailed, Trajectory, TurnDone
from headrace.messages.subjects import DLQ, FAIL, LEDGER, SCORE, TRAJ, TURN


class MeasuredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that counts for one trial of a task."""

    task: str
    family: str
    trial: int
    trajectory_seq: int
    score_seq: int
    passed: bool
    verdict: str
    reward: float
    rubric: dict[str, float]
    """Criterion to the share of votes that found it met; empty without a rubric judge."""
    version: int
    tokens: Tokens
    turns: int
    calls: int
    calls_by_tool: dict[str, int]
    invalid_calls: int
    parallel_calls: int
    """Most calls in one turn."""
    edits: int
    failed_edits: int
    reads_before_edit: int
    """Reads and searches before the first edit; those of all turns where there is no edit."""
    tested: bool
    """Whether the tests ran after the last edit."""
    lint_fixed: int
    """Problems of the linter that were gone the next time it ran over the same files."""
    asked: bool
    """Whether the last message to the user holds a question."""
    wall_s: float
    """Seconds from the start of the episode to its trajectory, waits for results included."""
    call_ms: tuple[float, ...]
    first_edit_turn: int | None
    first_edit_s: float | None
    """Seconds to the first edit. None without an edit, and where the turn log is deleted."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that infrastructure failed. It says nothing about the policy."""

    task: str
    trial: int
    attempt: int
    reason: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts of a benchmark."""

    attempts: tuple[MeasuredAttempt, ...]
    failures: tuple[Failure, ...]
    tasks: tuple[str, ...]
    """Every task that was issued, in the suite's order."""
    agreements: dict[str, Agreement]
    """Criterion to the rubric judge's agreement with labels. A run has one judge and one card."""


class _Slot:
    """One task of one trial while the streams are read."""

    def __init__(self, issued: SlotIssued) -> None:
        self.issued = {issued.attempt: issued}
        self.scores: dict[int, tuple[int, Score]] = {}
        self.reasons: dict[int, str] = {}

    def kept(self) -> tuple[int, Score] | None:
        """The newest attempt's score, which is the one that the evaluator counts."""
        return self.scores.get(max(self.issued))


async def measure(bus: Bus, trials: Sequence[EvalRequest]) -> Measured:
    """Read the streams of the run. trials: the benchmark's evaluations, in order."""
    attempts: list[MeasuredAttempt] = []
    failures: list[Failure] = []
    tasks: dict[str, None] = {}
    agreements: dict[str, Agreement] = {}
    for trial, request in enumerate(trials):
        slots = await _slots(bus, request)
        groups = sorted({group for group, _ in slots})
        trajectories, ended = await _episodes(bus, request.run, groups)
        for _, slot in sorted(slots.items()):
            task = slot.issued[0].task.task
            tasks.setdefault(task)
            outcome = slot.kept()
            if outcome is not None:
                seq, score = outcome
                agreements |= _agreements(score)
                episode, wall_from = trajectories[score.trajectory_seq]
                attempts.append(_attempt(trial, seq, score, episode, wall_from, ended.get(episode.id, {})))
            failures += [
                Failure(task=task, trial=trial, attempt=number, reason=reason)
                for number, reason in sorted(slot.reasons.items())
                if number not in slot.scores
            ]
    return Measured(
        attempts=tuple(attempts),
        failures=tuple(failures),
        tasks=tuple(tasks),
        agreements=dict(sorted(agreements.items())),
    )


def _agreements(score: Score) -> dict[str, Agreement]:
    criteria = score.rubric.criteria if score.rubric is not None else ()
    return {criterion.id: criterion.agreement for criterion in criteria if criterion.agreement is not None}


async def _slots(bus: Bus, request: EvalRequest) -> dict[tuple[str, int], _Slot]:
    """The slots of one evaluation with the results of their attempts."""
    run, prefix = request.run, group_prefix(request.id)
    slots: dict[tuple[str, int], _Slot] = {}
    async for received in bus.history("HR_LEDGER", LEDGER.where(run=run)):
        issued = received.message
        if isinstance(issued, SlotIssued) and issued.group.rpartition("-")[0] == prefix:
            slot = slots.setdefault((issued.group, issued.slot), _Slot(issued))
            slot.issued[issued.attempt] = issued
    async for received in bus.history("HR_LEDGER", FAIL.where(run=run)):
        failed = received.message
        if isinstance(failed, SlotFailed) and (failed.group, failed.slot) in slots:
            slots[failed.group, failed.slot].reasons[failed.attempt] = failed.reason
    async for received in bus.history("HR_DLQ", DLQ.where(stream="*")):
        letter = received.message
        lost = lost_attempts.lost_attempt(letter) if isinstance(letter, DeadLetter) else None
        if lost is not None and lost.run == run and (lost.group, lost.slot) in slots:
            slots[lost.group, lost.slot].reasons.setdefault(lost.attempt, lost_attempts.REASON)
    for group in sorted({group for group, _ in slots}):
        async for received in bus.history("HR_SCORE", SCORE.where(run=run, group=group)):
            score = received.message
            if isinstance(score, Score) and (group, score.slot) in slots:
                slots[group, score.slot].scores.setdefault(score.attempt, (received.seq, score))
    return slots


Ended = dict[str, dict[int, float]]
"""Trajectory to the times at which its turns' results were stored, in seconds since the epoch."""


async def _episodes(bus: Bus, run: str, groups: Sequence[str]) -> tuple[dict[int, tuple[Trajectory, float]], Ended]:
    """Trajectories by sequence, each with the time at which it began, and the ends of their turns."""
    trajectories: dict[int, tuple[Trajectory, float]] = {}
    ended: Ended = {}
    for group in groups:
        async for received in bus.history("HR_TRAJ", TRAJ.at(run=run, group=group)):
            if isinstance(episode := received.message, Trajectory):
                trajectories[received.seq] = (episode, received.time - episode.wall_s)
    for episode, _ in trajectories.values():
        async for turn in bus.history("HR_TURN", TURN.at(run=run, trajectory=episode.id)):
            if isinstance(turn.message, TurnDone):
                ended.setdefault(episode.id, {})[turn.message.index] = turn.time
    return trajectories, ended


def _attempt(
    trial: int, seq: int, score: Score, episode: Trajectory, began: float, ended: dict[int, float]
) -> MeasuredAttempt:
    by_tool = Counter(call.name for turn in episode.turns for call in turn.calls)
    acts = acts_of(episode.turns)
    made = [turn for turn, done in acts.edits if done]
    first = made[0] if made else None
    return MeasuredAttempt(
        task=score.task.task,
        family=score.family,
        trial=trial,
        trajectory_seq=score.trajectory_seq,
        score_seq=seq,
        passed=score.passed,
        verdict=score.verdict,
        reward=score.reward,
        rubric={criterion.id: criterion.met for criterion in score.rubric.criteria} if score.rubric is not None else {},
        version=score.oldest_version,
        tokens=tokens_of(episode.turns),
        turns=len(episode.turns),
        calls=by_tool.total(),
        calls_by_tool=dict(sorted(by_tool.items())),
        invalid_calls=episode.malformed_calls,
        parallel_calls=acts.most_calls,
        edits=len(acts.edits),
        failed_edits=len(acts.edits) - len(made),
        reads_before_edit=acts.reads_before_edit,
        tested=acts.tested,
        lint_fixed=acts.lint_fixed,
        asked=acts.asked,
        wall_s=episode.wall_s,
        call_ms=tuple(result.wall_ms for turn in episode.turns for result in turn.results),
        first_edit_turn=first,
        first_edit_s=round(ended[first] - began, 4) if first is not None and first in ended else None,
    )
