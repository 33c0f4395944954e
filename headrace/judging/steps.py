"""The verdict on an attempt at a task with steps, from the verdicts on its steps.

Every step that was reached is judged by its own tests, with the changes that the attempt had made when the step ended.
The attempt's value is the mean of the steps' rewards, or the reward of the last step. A step whose reward misses
`StepTests.min_reward`, whose tests write no reward or that is cheating or a crash is the last one that is examined.
Steps that were not reached or not examined have the reward 0. (Harbor leaves them out of the mean, and takes the last
reached step for the last one; then a policy could earn more by missing a condition than by meeting it.)
"""

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from headrace.judging import rules
from headrace.judging.candidates import Candidate
from headrace.judging.verdicts import Examination, Verdict, conclude, passes
from headrace.messages.judging import StepScore
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import Snapshot
from headrace.registry import merged

STEP = 1 << 16
"""Added to an attempt's number for each step, so that every step has a sandbox of its own."""


def parts(candidate: Candidate) -> list[Candidate]:
    """A candidate for every step that was reached; the candidate itself where the task has no steps."""
    trajectory, task, oracle = candidate.trajectory, candidate.task, candidate.oracle
    if not oracle.steps:
        return [candidate]
    candidates = []
    given: dict[str, bytes] = {}
    for index, (tests, snapshot) in enumerate(zip(oracle.steps.tests, _snapshots(trajectory), strict=False)):
        given |= task.later[index - 1].files if index else {}
        changes = msgspec.structs.asdict(snapshot)
        # The rules compare with the step's own files too, which are no work of the candidate's.
        changes["originals"] = given | snapshot.originals
        part = msgspec.structs.replace(
            trajectory,
            id=f"{trajectory.id}-step{index + 1}",
            attempt=trajectory.attempt + index * STEP,
            earlier=UNSET,
            **changes,
        )
        candidates.append(
            Candidate(
                trajectory=part,
                task=msgspec.structs.replace(task, allowed=tests.allowed, steps=UNSET),
                oracle=msgspec.structs.replace(
                    oracle,
                    hidden=tests.hidden,
                    entries=tests.entries,
                    tests=tests.tests,
                    script=tests.script,
                    separate=tests.separate,
                    verifier=tests.verifier,
                    steps=UNSET,
                ),
            )
        )
    return candidates


def _snapshots(trajectory: Trajectory) -> list[Snapshot]:
    """The changes at the end of every step that was reached."""
    last = {name: getattr(trajectory, name) for name in Snapshot.__struct_fields__}
    return [*(trajectory.earlier or ()), Snapshot(**last)]


def suspicions(candidate: Candidate, scores: Sequence[StepScore] = ()) -> tuple[str, ...]:
    """The rules that an attempt matches, in any of its steps. scores: the recorded verdicts on them; the rules were not
    applied to steps behind the first that ended the examination."""
    last = next((number for number, score in enumerate(scores, 1) if score.reason), None)
    matched: dict[str, None] = {}
    for part in parts(candidate)[:last]:
        trajectory = part.trajectory
        of_diff = rules.suspicions(part.task, part.oracle, trajectory.diff, trajectory.touched, trajectory.originals)
        matched |= dict.fromkeys((*of_diff, *rules.behaviour(part.task, trajectory)))
    return tuple(matched)


def ends(candidate: Candidate, verdicts: Sequence[Verdict]) -> str:
    """Why no later step than that of the last verdict is examined; empty where the next one is."""
    verdict = verdicts[-1]
    if verdict.decision == "candidate_crash":
        return "the sandbox ended twice under its tests"
    if verdict.decision == "cheating":
        return "cheating"
    if verdict.reason or not candidate.oracle.steps:
        return verdict.reason
    for key, least in candidate.oracle.steps.tests[len(verdicts) - 1].min_reward.items():
        value = verdict.rewards.get(key)
        if value is None or value < least:
            return f"min_reward: {key} is {'missing' if value is None else f'{value:g}'}, expected at least {least:g}"
    return ""


def combined(candidate: Candidate, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on the attempt. verdicts: those of the steps up to the first that `ends` it, or of the only part."""
    oracle = candidate.oracle
    if not oracle.steps:
        return verdicts[0]
    scores = _scores(candidate, verdicts)
    value = _total(scores, oracle.steps.reward)
    examination = Examination(
        ok=passes(oracle, (), value),
        tests=tuple(test for verdict in verdicts for test in verdict.tests),
        value=value,
        steps=scores,
        crashed=any(verdict.decision == "candidate_crash" for verdict in verdicts),
        timed_out=any(verdict.timed_out for verdict in verdicts),
    )
    matched = dict.fromkeys(entry for verdict in verdicts for entry in verdict.suspicions)
    seconds = {verdict.again for verdict in verdicts}
    verdict = conclude(
        oracle,
        examination,
        tuple(matched),
        again="other" if "other" in seconds else "same" if "same" in seconds else "",
    )
    refused = next((verdict.reason for verdict in verdicts if verdict.reason), "")
    output = next((verdict.output for verdict in verdicts if not verdict.passed), "")
    plugins = merged(*(verdict.plugins for verdict in verdicts))
    machines = tuple(dict.fromkeys(machine for verdict in verdicts for machine in verdict.machines))
    return msgspec.structs.replace(verdict, reason=refused, plugins=plugins, machines=machines, output=output)


def _scores(candidate: Candidate, verdicts: Sequence[Verdict]) -> tuple[StepScore, ...]:
    """The verdicts on all steps of the task, with their shares of the attempt's value."""
    assert candidate.oracle.steps
    tests, reached = candidate.oracle.steps.tests, len(candidate.trajectory.earlier or ()) + 1
    scores: list[StepScore] = []
    before = 0.0
    for index, step in enumerate(tests):
        value, reason = None, "the attempt did not reach this step"
        if index < len(verdicts):
            reason = ends(candidate, verdicts[: index + 1])
            value = None if verdicts[index].reason else verdicts[index].value
        elif index < reached:
            reason = f"not examined, because of step {tests[len(verdicts) - 1].name}"
        scores.append(StepScore(name=step.name, value=value, reason=reason))
        total = _total(scores, candidate.oracle.steps.reward, len(tests))
        scores[-1] = msgspec.structs.replace(scores[-1], share=total - before)
        before = total
    return tuple(scores)


def _total(scores: Sequence[StepScore], reward: str, steps: int = 0) -> float:
    """The value of the first steps, the others counted as 0. steps: their number in the task."""
    steps = steps or len(scores)
    values = [score.value or 0.0 for score in scores]
    if reward == "final":
        return values[-1] if len(values) == steps else 0.0
    return math.fsum(values) / steps
