"""The verdict on an attempt at a task with steps, from the verdicts on its steps."""

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from headrace.algorithms.rewards import Judged, shaped_parts
from headrace.judging.candidates import Candidate
from headrace.judging.steps import combined, ends, parts, suspicions
from headrace.judging.verdicts import Verdict, conclude, recorded
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import Snapshot
from headrace.messages.tasks import CheatRule, Grading, Oracle, Step, Steps, StepTests, Task, TaskRef, TestPlan
from tests.support.records import of

REF = TaskRef("s", "t")
PLAN = TestPlan(kind="command", argv=("true",))
PASSED = Verdict(decision="passed", value=1.0, rewards={"reward": 1.0})
FAILED = Verdict(decision="failed", value=0.0, rewards={"reward": 0.0})


def candidate(reward: Any = "mean", reached: int = 3, **least: dict[str, float]) -> Candidate:
    """An attempt at three steps. least: conditions by the name of the step."""
    tests = [
        StepTests(name=name, hidden={f"{name}.sh": b""}, tests=PLAN, allowed=("*.txt",), min_reward=least.get(name, {}))
        for name in ("a", "b", "c")
    ]
    grading = Grading(kind="reward_file", file="reward")
    steps = Steps(tests=tuple(tests), reward=reward)
    later = (Step(prompt="b", files={"given.py": b"import pytest\n"}), Step(prompt="c"))
    task = Task(ref=REF, family="f", prompt="a", files={}, allowed=("**",), tests=PLAN, steps=later)
    diffs = [{"x.txt": str(number).encode()} for number in range(reached)]
    trajectory = of(
        Trajectory,
        run="r",
        group="g",
        slot=1,
        attempt=2,
        id="g-1-2",
        task=REF,
        diff=diffs[-1] | ({"given.py": b"import pytest\n"} if reached > 1 else {}),
        earlier=tuple(Snapshot(diff=diff) for diff in diffs[:-1]),
    )
    oracle = Oracle(ref=REF, hidden={}, tests=PLAN, expected=(), solution={}, grading=grading, steps=steps)
    return Candidate(trajectory=trajectory, task=task, oracle=oracle)


def outcome(attempt: Candidate, *verdicts: Verdict) -> tuple[str, float | None, list[float]]:
    verdict = combined(attempt, verdicts)
    return verdict.decision, verdict.value, [round(step.share, 6) for step in verdict.steps]


def told(attempt: Candidate) -> Candidate:
    """The attempt at a task whose suite asks for a note."""
    rule = CheatRule(name="imports_pytest", pattern="import pytest")
    return msgspec.structs.replace(attempt, oracle=msgspec.structs.replace(attempt.oracle, cheating=(rule,)))


def test_every_step_that_was_reached_is_a_candidate_of_its_own() -> None:
    first, second = parts(candidate(reached=2))
    assert [first.trajectory.diff, second.trajectory.diff["x.txt"]] == [{"x.txt": b"0"}, b"1"]
    assert (first.oracle.hidden, second.oracle.hidden) == ({"a.sh": b""}, {"b.sh": b""})
    assert first.task.allowed == ("*.txt",) and first.oracle.steps is UNSET
    identities = {(part.trajectory.id, part.trajectory.attempt) for part in (first, second)}
    assert len(identities) == 2, "every step has a sandbox of its own"
    plain = Candidate(trajectory=first.trajectory, task=first.task, oracle=first.oracle)
    assert parts(plain) == [plain]


def test_a_file_that_came_with_a_step_is_no_change_of_the_attempt() -> None:
    assert suspicions(told(candidate(reached=2))) == ()
    forged = told(candidate(reached=1))
    forged.trajectory.diff["given.py"] = b"import pytest\n"
    assert suspicions(forged) == ("imports_pytest:given.py",), "before its step it is"


def test_the_mean_of_all_steps_or_the_last_one() -> None:
    assert outcome(candidate(), PASSED, PASSED, PASSED) == ("passed", 1.0, [0.333333, 0.333333, 0.333333])
    assert outcome(candidate(), PASSED, FAILED, PASSED)[:2] == ("failed", 2 / 3)
    assert outcome(candidate("final"), PASSED, FAILED, PASSED) == ("passed", 1.0, [0.0, 0.0, 1.0])
    assert outcome(candidate("final"), PASSED, PASSED, FAILED)[:2] == ("failed", 0.0)


def test_steps_that_were_not_reached_count_as_0() -> None:
    verdict = combined(candidate(reached=1), [PASSED])
    assert (verdict.decision, verdict.value) == ("failed", 1 / 3)
    assert [step.reason for step in verdict.steps] == ["", *["the attempt did not reach this step"] * 2]
    assert combined(candidate("final", reached=2), [PASSED, PASSED]).value == 0.0


@pytest.mark.parametrize(
    ("least", "rewards", "reason"),
    [
        ({"reward": 1.0}, {"reward": 1.0}, ""),
        ({"reward": 0.5}, {"reward": 0.25}, "min_reward: reward is 0.25, expected at least 0.5"),
        ({"style": 0.5}, {"reward": 1.0}, "min_reward: style is missing, expected at least 0.5"),
        ({"reward": 1.0, "style": 0.5}, {"reward": 1.0, "style": 0.5}, ""),
    ],
)
def test_a_missed_condition_ends_the_examination(
    least: dict[str, float], rewards: dict[str, float], reason: str
) -> None:
    attempt = candidate(a=least)
    first = Verdict(decision="failed", value=rewards["reward"], rewards=rewards)
    assert ends(attempt, [first]) == reason
    if reason:
        verdict = combined(attempt, [first])
        assert verdict.value == rewards["reward"] / 3
        assert [step.reason for step in verdict.steps] == [reason, *["not examined, because of step a"] * 2]


def test_a_step_without_a_reward_ends_the_examination_and_keeps_the_earlier_ones() -> None:
    broken = Verdict(decision="failed", reason="refused_output: expected a number in the reward file, got b'x'")
    assert ends(candidate(), [PASSED, broken]) == broken.reason
    verdict = combined(candidate(), [PASSED, broken])
    assert (verdict.value, verdict.reason) == (1 / 3, broken.reason) and verdict.steps[1].value is None


def test_a_crash_and_a_cheat_in_one_step_are_those_of_the_attempt() -> None:
    crash = Verdict(decision="candidate_crash")
    assert ends(candidate(), [crash]) and combined(candidate(), [PASSED, crash]).decision == "candidate_crash"
    cheat = Verdict(decision="cheating", value=1.0, suspicions=("control:tests",))
    assert ends(candidate(), [cheat]) and combined(candidate(), [cheat]).decision == "cheating"
    seconds = [Verdict(decision="failed", value=0.0, again=again) for again in ("same", "other")]
    assert combined(candidate(), seconds).again == "other"


def test_the_parts_of_the_reward_are_the_steps_and_a_recorded_score_gives_the_same() -> None:
    attempt = candidate(reached=2)
    verdict = combined(attempt, [PASSED, PASSED])
    fields: dict[str, Any] = {"trajectory": attempt.trajectory, "tests": (), "suspicions": (), "tokens": 0}
    judged = Judged(
        **fields,
        verdict=verdict.decision,
        passed=False,
        value=verdict.value,
        steps=verdict.steps,
        calls=0,
        turns=0,
        prices={},
    )
    made = shaped_parts(judged)
    assert list(made) == ["step a", "step b", "step c"] and sum(made.values()) == verdict.value == 2 / 3
    score = of(
        Score,
        run="r",
        group="g",
        slot=1,
        attempt=2,
        trajectory_seq=1,
        task=REF,
        verdict=verdict.decision,
        reward=2 / 3,
        value=verdict.value,
        steps=verdict.steps,
    )
    again = conclude(attempt.oracle, recorded(score, attempt.oracle), ())
    assert (again.decision, again.value, again.steps) == (verdict.decision, verdict.value, verdict.steps)


def test_rules_are_not_applied_to_recorded_steps_that_were_not_examined() -> None:
    attempt = told(candidate(reached=2, a={"reward": 1.0}))
    attempt.trajectory.diff["x.py"] = b"import pytest\n"
    ended = Verdict(decision="failed", value=0.5, rewards={"reward": 0.5})
    scores = combined(attempt, [ended]).steps
    assert suspicions(attempt, scores) == () and suspicions(attempt) == ("imports_pytest:x.py",)
    scores = combined(candidate(reached=2), [PASSED, FAILED]).steps
    assert suspicions(attempt, scores) == ("imports_pytest:x.py",)
