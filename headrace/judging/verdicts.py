"""From one examination and the matched rules to a verdict.

The verdict is a pure function of what was reported, what was expected and which rules matched: the judge actor and
re-judging from records call the same one.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.errors import HeadraceError
from headrace.judging import rules
from headrace.messages.judging import RubricScore, Score, StepScore
from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import TestOutcome
from headrace.messages.tasks import Oracle

Decision = Literal["passed", "failed", "cheating", "candidate_crash"]
Control = Literal["", "passed", "blind"]
"""``passed``: altered tests passed; ``blind``: they pass over the known solution, too, or there is none."""
COMMAND = "command"
"""The one test of a command whose exit code decides."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the hidden tests in one sandbox."""

    ok: bool = False
    """Whether it passed by the task's grading."""
    tests: tuple[TestOutcome, ...] = ()
    value: float | None = None
    """The number of a reward file or a checker."""
    rewards: dict[str, float] = {}
    """All numbers of a reward file by key."""
    steps: tuple[StepScore, ...] = ()
    """The verdicts on the steps of a task with steps, whose examinations it stands for."""
    crashed: bool = False
    """Whether the machine died twice under the candidate."""
    timed_out: bool = False
    """Whether a command ran past its time limit."""
    refused: str = ""
    """Why the report of the candidate's process was not read (judging/outcomes.py)."""
    touched: tuple[str, ...] = ()
    """Parts of the machine that the integrity check found changed."""
    alone: bool = False
    """Whether the machine held no other candidate."""
    control: Control = ""
    """Of altered tests (judging/hidden/control.py): empty where they failed as they should."""
    output: str = ""
    """The end of what the tests printed, for a certificate."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's answer about one candidate."""

    decision: Decision
    tests: tuple[TestOutcome, ...] = ()
    value: float | None = None
    """The number of a reward file or a checker; None where tests decide."""
    lowest: float = 0.0
    """The smallest `value` that the task gives."""
    rewards: dict[str, float] = {}
    """All numbers of a reward file by key."""
    steps: tuple[StepScore, ...] = ()
    """The verdicts on the steps, where the task has some."""
    suspicions: tuple[str, ...] = ()
    again: Literal["", "same", "other"] = ""
    """Whether a second examination, alone in a machine, gave the same; empty without one."""
    rubric: RubricScore | None = None
    """Of a rubric judge, beside the tests; it decides nothing here."""
    reason: str = ""
    """``refused_output``, a colon and one sentence, where the judge did not read the output of the tests."""
    timed_out: bool = False
    """Whether a command of an examination ran past its time limit."""
    machines: tuple[tuple[str, str], ...] = ()
    """Backend and content address of the machines of its examinations, each once."""
    plugins: tuple[Plugin, ...] = ()
    """Sandbox backends of its examinations that come from outside of headrace."""
    output: str = ""
    """The end of what the tests printed."""

    @property
    def passed(self) -> bool:
        """Whether the candidate solved the task by honest means."""
        return self.decision == "passed"


class NoVerdict(HeadraceError):
    """Our own code failed on an attempt, so that it is left out of its group; no candidate can cause it.

    reason: ``judge_fault`` (the judge raised), ``reward_error`` (a checker or reward raised, or gave no number), or
    ``no_verdict`` (the reward abstained).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def all_passed(tests: Sequence[TestOutcome], expected: Sequence[str]) -> bool:
    """Whether exactly the expected tests were reported, each once and as passed."""
    return sorted(test.name for test in tests) == sorted(expected) and all(test.outcome == "passed" for test in tests)


def passes(oracle: Oracle, tests: Sequence[TestOutcome], value: float | None = None) -> bool:
    """Whether outcomes, or the number of a reward file or checker, are a pass by the task's grading."""
    grading = oracle.grading
    match grading.kind:
        case "exact":
            return all_passed(tests, oracle.expected)
        case "f2p_p2p":
            return named_passed(tests, oracle.expected, grading.pass_to_pass)
        case "all_tests":
            outcomes = {test.outcome for test in tests}
            return "passed" in outcomes and not outcomes & {"failed", "error"}
        case "exit_code":
            return all_passed(tests, (COMMAND,))
    return value is not None and value >= grading.passes_at


def named_passed(tests: Sequence[TestOutcome], to_pass: Sequence[str], to_keep: Sequence[str]) -> bool:
    """The first names passed, the second ones passed or were skipped; a test that is reported twice counts by its
    worst outcome.

    Names of SWE-bench come from a log. One that is cut inside its parameters stands for all reported ones that begin
    with it, where they agree; spaces in it may be fewer, and the reason of an expected failure may follow behind " - ".
    """
    outcomes: dict[str, set[str]] = {}
    in_logs: dict[str, set[str]] = {}
    for test in tests:
        outcomes.setdefault(test.name, set()).add(test.outcome)
        in_logs.setdefault(" ".join(test.name.split()), set()).add(test.outcome)

    def among(name: str, good: set[str]) -> bool:
        seen = outcomes.get(name, set())
        if not seen and name.count("[") > name.count("]"):
            seen = {outcome for other, results in outcomes.items() if other.startswith(name) for outcome in results}
        if not seen:
            parts = " ".join(name.split()).split(" - ")
            starts = (" - ".join(parts[:end]) for end in range(len(parts), 0, -1))
            seen = next((in_logs[start] for start in starts if start in in_logs), seen)
        return bool(seen) and seen <= good

    return (
        bool(to_pass)
        and all(among(name, {"passed"}) for name in to_pass)
        and all(among(name, {"passed", "skipped"}) for name in to_keep)
    )


def decide(ok: bool, suspicions: Sequence[str], *, partly: bool = False) -> Decision:
    """``passed``, ``failed`` or ``cheating``. partly: whether a failed attempt has a reward.

    A finding of the examination voids a pass; notes do not. A changed machine is cheating with or without a pass.
    """
    findings = rules.void(suspicions)
    if findings and (ok or partly or rules.TOUCHED in findings):
        return "cheating"
    return "passed" if ok else "failed"


def conclude(
    oracle: Oracle,
    examination: Examination,
    suspicions: Sequence[str],
    *,
    again: Literal["", "same", "other"] = "",
) -> Verdict:
    """The verdict on an examination. suspicions: of the diff and of the episode; what the examination itself found is
    added here."""
    matched = list(suspicions)
    if examination.alone:
        matched += [f"{rules.TOUCHED}:{what}" for what in examination.touched]
    if examination.control:
        matched.append(f"{rules.CONTROL if examination.control == 'passed' else rules.BLIND}:tests")
    partly = bool(examination.value) or any(step.value for step in examination.steps)
    decided = decide(examination.ok, matched, partly=partly)
    decision: Decision = "candidate_crash" if examination.crashed else decided
    return Verdict(
        decision=decision,
        tests=examination.tests,
        value=examination.value,
        lowest=oracle.grading.lowest or 0.0,
        rewards=examination.rewards,
        steps=examination.steps,
        suspicions=tuple(matched),
        again=again,
        timed_out=examination.timed_out,
        output=examination.output,
        reason=f"refused_output: {examination.refused}" if examination.refused else "",
    )


def recorded(score: Score, oracle: Oracle) -> Examination:
    """The examination that a Score records. Its machine counts as the candidate's own, because the Score's findings
    about the machine are from there."""
    prefix = f"{rules.TOUCHED}:"
    refused = score.reason.partition("refused_output: ")[2]
    names = {entry.partition(":")[0] for entry in score.suspicions}
    return Examination(
        ok=score.verdict != "candidate_crash" and not refused and passes(oracle, score.tests, score.value),
        tests=score.tests,
        value=score.value,
        steps=score.steps or (),
        crashed=score.verdict == "candidate_crash",
        refused=refused,
        touched=tuple(entry.removeprefix(prefix) for entry in score.suspicions if entry.startswith(prefix)),
        alone=True,
        control="passed" if rules.CONTROL in names else "blind" if rules.BLIND in names else "",
    )
