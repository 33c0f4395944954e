"""From one examination and the matched rules to a verdict.

The verdict is a pure function of what was reported, what was expected and which rules matched: the judge actor and
re-judging from records call the same one.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from headrace.judging import rules
from headrace.judging.rules import Severity
from headrace.messages.judging import Score
from headrace.messages.sandbox import TestOutcome
from headrace.messages.tasks import Oracle

Decision = Literal["passed", "failed", "cheating", "candidate_crash"]


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the hidden tests in one sandbox."""

    ok: bool = False
    """Exactly the expected tests were reported, all as passed."""
    tests: tuple[TestOutcome, ...] = ()
    crashed: bool = False
    """The candidate took its machine down twice."""
    refused: str = ""
    """Why the report of the candidate's process was not read (judging/outcomes.py)."""
    touched: tuple[str, ...] = ()
    """Parts of the machine that the integrity check found changed."""
    alone: bool = False
    """The machine held no other candidate."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's answer about one candidate."""

    decision: Decision
    tests: tuple[TestOutcome, ...] = ()
    suspicions: tuple[str, ...] = ()
    again: Literal["", "same", "other"] = ""
    """Examined a second time, alone in a machine: whether that gave the same."""
    reason: str = ""
    """Why there is nothing better than reward 0: refused output, or a fault of the judge."""

    @property
    def passed(self) -> bool:
        """Whether the candidate solved the task by honest means."""
        return self.decision == "passed"


def all_passed(tests: Sequence[TestOutcome], expected: Sequence[str]) -> bool:
    """Exactly the expected tests were reported, each once, each as passed."""
    return sorted(test.name for test in tests) == sorted(expected) and all(test.outcome == "passed" for test in tests)


def decide(ok: bool, suspicions: Sequence[str], severities: Mapping[str, Severity] | None = None) -> Decision:
    """``passed``, ``failed`` or ``cheating``.

    Changed tests do not void a pass, because the host's own tests replaced them; without a pass they are an attempt to
    cheat. A machine that was changed is one with or without a pass.
    """
    zero = rules.zero_rules(suspicions, severities)
    if ok:
        return "cheating" if zero - {"changes_tests"} else "passed"
    return "cheating" if zero & {"changes_tests", *rules.WHETHER_PASSED} else "failed"


def conclude(
    oracle: Oracle,
    examination: Examination,
    suspicions: Sequence[str],
    *,
    again: Literal["", "same", "other"] = "",
    severities: Mapping[str, Severity] | None = None,
) -> Verdict:
    """The verdict on an examination. suspicions: of the diff and of the episode; what the examination itself found is
    added here."""
    matched = list(suspicions)
    if examination.alone:
        matched += [f"machine_touched:{what}" for what in examination.touched]
    matched += rules.impossible_passed(oracle, examination.ok)
    decision: Decision = "candidate_crash" if examination.crashed else decide(examination.ok, matched, severities)
    return Verdict(
        decision=decision,
        tests=examination.tests,
        suspicions=tuple(matched),
        again=again,
        reason=f"refused_output: {examination.refused}" if examination.refused else "",
    )


def recorded(score: Score, oracle: Oracle) -> Examination:
    """The examination that a Score records. Its machine counts as the candidate's own: what stands in the Score about
    the machine was found there."""
    prefix = "machine_touched:"
    refused = score.reason.partition("refused_output: ")[2]
    return Examination(
        ok=score.verdict != "candidate_crash" and not refused and all_passed(score.tests, oracle.expected),
        tests=score.tests,
        crashed=score.verdict == "candidate_crash",
        refused=refused,
        touched=tuple(entry.removeprefix(prefix) for entry in score.suspicions if entry.startswith(prefix)),
        alone=True,
    )
