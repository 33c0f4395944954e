"""Measures the behaviour of attempts: calls in one turn, reads before edits, tests, lint errors fixed, questions.

The trainer publishes the means of every step in StepDone, and the benchmark those of each attempt.
"""

import re
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from headrace.messages.rollout import ToolCall, Trajectory, Turn
from headrace.messages.training import Behaviour

EDITS = frozenset({"edit", "edit_file", "write_file"})
READS = frozenset({"read_file", "search", "list_files", "semantic_search", "keyword_search"})
TESTS = frozenset({"run_tests"})
LINT, FINISH = "lint", "finish"
_PROBLEM = re.compile(r"^\S.*:\d+: ", re.MULTILINE)
"""One problem of the lint tool, as it prints it."""


class Acts(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of one attempt."""

    calling_turns: int
    """Turns with a call of a tool, broken calls included."""
    calls: int
    most_calls: int
    """In one turn."""
    edits: tuple[tuple[int, bool], ...]
    """Turn of each call that edits, and whether it did."""
    reads_before_edit: int
    """Reads and searches before the first edit that succeeded; those of all turns where there is none."""
    tested: bool
    """Whether the tests ran after the last edit."""
    lint_fixed: int
    """Problems by which a lint of the same files was shorter than the one before it, added up."""
    asked: bool
    """Whether the last message to the user holds a question."""


def acts_of(turns: Sequence[Turn]) -> Acts:
    """The behaviour of an attempt, from its calls and their results."""
    calls: list[tuple[int, ToolCall, bool]] = []
    problems: dict[str, int] = {}
    fixed = 0
    for turn in turns:
        results = {result.call_id: result for result in turn.results}
        for call in turn.calls:
            result = results.get(call.id)
            done = not call.error and result is not None and result.ok
            calls.append((turn.index, call, done))
            if done and result is not None and call.name == LINT and not result.truncated:
                files, count = call.arguments.get("glob", ""), len(_PROBLEM.findall(result.output))
                fixed += max(0, problems.get(files, count) - count)
                problems[files] = count
    edits = [at for at, (_, call, _) in enumerate(calls) if call.name in EDITS]
    made = [at for at in edits if calls[at][2]]
    last = calls[-1][1] if calls else None
    return Acts(
        calling_turns=sum(any(call.name for call in turn.calls) for turn in turns),
        calls=sum(bool(call.name) for _, call, _ in calls),
        most_calls=max((len(turn.calls) for turn in turns), default=0),
        edits=tuple((calls[at][0], calls[at][2]) for at in edits),
        reads_before_edit=sum(call.name in READS for _, call, _ in calls[: made[0] if made else None]),
        tested=any(call.name in TESTS for _, call, _ in calls[made[-1] if made else 0 :]),
        lint_fixed=fixed,
        asked=last is not None and last.name == FINISH and "?" in last.arguments.get("message", ""),
    )


def behaviour_of(trajectories: Iterable[Trajectory]) -> Behaviour | None:
    """The means over attempts with calls; None where no attempt has one, as in tasks of one message."""
    acts = [made for each in trajectories if (made := acts_of(each.turns)).calls]
    if not acts:
        return None
    return Behaviour(
        calls_per_turn=round(
            sum(attempt.calls for attempt in acts) / sum(attempt.calling_turns for attempt in acts), 4
        ),
        reads_before_edit=round(fmean(attempt.reads_before_edit for attempt in acts), 4),
        tested=round(fmean(attempt.tested for attempt in acts), 4),
        lint_fixed=round(fmean(attempt.lint_fixed for attempt in acts), 4),
        asked=round(fmean(attempt.asked for attempt in acts), 4),
    )
