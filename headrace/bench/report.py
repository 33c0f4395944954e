"""The report of a benchmark, as a pure function of `attempts.measure`'s result, and the comparison of two reports."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from headrace.algorithms.paired import (
    Difference,
    Interval,
    all_pass,
    paired_difference,
    share_interval,
    silent_share,
)
from headrace.bench.attempts import Failure, Measured, MeasuredAttempt
from headrace.errors import HeadraceError
from headrace.messages.judging import Agreement

RESAMPLES = 1000


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """The median and the 95th percentile of a distribution; None without values."""

    p50: float | None = None
    p95: float | None = None
    count: int = 0


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Means over attempts."""

    prompt_tokens: float
    observed_tokens: float
    acting_tokens: float
    thinking_tokens: float | None = None
    """Of the acting tokens. None where an attempt does not count its tokens by kind, as in older records."""
    call_tokens: float | None = None
    """Of the acting tokens. None as above."""
    text_tokens: float | None = None
    """Of the acting tokens, neither thinking nor calls. None as above."""
    summary_tokens: float
    dropped_tokens: float = 0.0
    """Of all tokens, those of ended segments that no later one sees."""
    turns: float
    calls: float
    parallel_calls: float
    """Most calls in one turn."""
    reads_before_edit: float
    tested: float
    """Share of attempts that ran the tests after their last edit."""
    lint_fixed: float = 0.0
    """Problems of the linter that were gone the next time it ran over the same files."""
    asked: float = 0.0
    """Share of attempts whose last message to the user holds a question."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one suite."""

    id: str
    run: str
    policy: str
    suite: str
    version: int
    tasks: int
    trials: int
    attempts: int
    """Attempts with a verdict."""
    infra_failures: int
    """Attempts that infrastructure failed; each may have been replaced by another attempt."""
    infra_lost: int
    """Trials that never got a verdict. They count neither as passed nor as failed."""
    pass_1: Interval
    pass_k: Interval
    """The probability that all trials of a task pass, over tasks with all of their trials."""
    shares: dict[str, float]
    """Task to the share of its trials that passed."""
    families: dict[str, float]
    verdicts: dict[str, int]
    adherence: dict[str, float]
    """Criterion of the rubric to the mean share of votes that found it met."""
    agreements: dict[str, Agreement] = {}
    """Criterion to the judge's agreement with labels; a criterion that is on no card is not in it."""
    means: Means
    calls_by_tool: dict[str, float]
    invalid_call_share: float
    failed_edit_share: float
    attempt_s: Quantiles
    call_ms: Quantiles
    first_edit_s: Quantiles
    first_edit_turn: Quantiles
    sampled_tokens_per_pass: float | None
    """Sampled tokens of all attempts, divided by the number of passed ones. None where none passed."""
    attempt_s_per_pass: float | None
    silent: float
    """Share of resamples in which the policy, compared with itself, shows no difference."""
    rows: tuple[MeasuredAttempt, ...]
    failures: tuple[Failure, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two policies on the same tasks: the second compared with the first."""

    first: str
    second: str
    suite: str
    pass_1: Difference
    finding: str
    """``better``, ``worse`` or ``not distinguishable``."""
    sampled_tokens_ratio: float | None
    """Sampled tokens per attempt of the second policy, divided by those of the first."""
    calls_ratio: float | None


class NotComparable(HeadraceError):
    """Two reports cannot be compared; the text gives the reason."""


def report(id: str, run: str, policy: str, suite: str, trials: int, measured: Measured) -> Report:
    """The report of a benchmark that has ended."""
    rows = measured.attempts
    outcomes = {task: [row.passed for row in rows if row.task == task] for task in measured.tasks}
    shares = {task: fmean(passed) for task, passed in outcomes.items() if passed}
    complete = [passed for passed in outcomes.values() if len(passed) == trials]
    passes = sum(row.passed for row in rows)
    calls = sum(row.calls for row in rows)
    edits = sum(row.edits for row in rows)
    return Report(
        id=id,
        run=run,
        policy=policy,
        suite=suite,
        version=max((row.version for row in rows), default=-1),
        tasks=len(measured.tasks),
        trials=trials,
        attempts=len(rows),
        infra_failures=len(measured.failures),
        infra_lost=len(measured.tasks) * trials - len(rows),
        pass_1=share_interval(list(shares.values())),
        pass_k=share_interval([all_pass(sum(passed), trials, trials) for passed in complete]),
        shares=shares,
        families=_by_family(rows),
        verdicts={name: sum(row.verdict == name for row in rows) for name in sorted({row.verdict for row in rows})},
        adherence={
            name: _mean(row.rubric[name] for row in rows if name in row.rubric)
            for name in sorted({name for row in rows for name in row.rubric})
        },
        agreements=measured.agreements,
        means=Means(
            prompt_tokens=_mean(row.tokens.prompt for row in rows),
            observed_tokens=_mean(row.tokens.observed for row in rows),
            acting_tokens=_mean(row.tokens.acting for row in rows),
            thinking_tokens=_mean_of_all(row.tokens.thinking for row in rows),
            call_tokens=_mean_of_all(row.tokens.calls for row in rows),
            text_tokens=_mean_of_all(row.tokens.text for row in rows),
            summary_tokens=_mean(row.tokens.summary for row in rows),
            dropped_tokens=_mean(row.tokens.dropped for row in rows),
            turns=_mean(row.turns for row in rows),
            calls=_mean(row.calls for row in rows),
            parallel_calls=_mean(row.parallel_calls for row in rows),
            lint_fixed=_mean(row.lint_fixed for row in rows),
            asked=_mean(row.asked for row in rows),
            reads_before_edit=_mean(row.reads_before_edit for row in rows),
            tested=_mean(row.tested for row in rows),
        ),
        calls_by_tool={
            name: _mean(row.calls_by_tool.get(name, 0) for row in rows)
            for name in sorted({name for row in rows for name in row.calls_by_tool})
        },
        invalid_call_share=sum(row.invalid_calls for row in rows) / calls if calls else 0.0,
        failed_edit_share=sum(row.failed_edits for row in rows) / edits if edits else 0.0,
        attempt_s=quantiles(row.wall_s for row in rows),
        call_ms=quantiles(ms for row in rows for ms in row.call_ms),
        first_edit_s=quantiles(row.first_edit_s for row in rows if row.first_edit_s is not None),
        first_edit_turn=quantiles(row.first_edit_turn for row in rows if row.first_edit_turn is not None),
        sampled_tokens_per_pass=sum(row.tokens.sampled for row in rows) / passes if passes else None,
        attempt_s_per_pass=sum(row.wall_s for row in rows) / passes if passes else None,
        silent=silent_share(outcomes, RESAMPLES, seed=0),
        rows=rows,
        failures=measured.failures,
    )


def compare(first: Report, second: Report) -> Comparison:
    """Compare the second policy with the first, task by task. NotComparable when they share no task."""
    if first.suite != second.suite:
        raise NotComparable(
            f"{first.id} measured {first.suite} and {second.id} measured {second.suite}: the suites differ"
        )
    difference = paired_difference(first.shares, second.shares)
    if not difference.tasks:
        raise NotComparable(f"{first.id} and {second.id} have no task with a verdict in common")
    finding = "not distinguishable" if difference.silent else "better" if difference.mean > 0 else "worse"
    return Comparison(
        first=first.policy,
        second=second.policy,
        suite=first.suite,
        pass_1=difference,
        finding=finding,
        sampled_tokens_ratio=_ratio(_sampled(second), _sampled(first)),
        calls_ratio=_ratio(second.means.calls, first.means.calls),
    )


def quantiles(values: Iterable[float]) -> Quantiles:
    """Percentiles that are values of the sample, without interpolation."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles()
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95)]
    return Quantiles(p50=at[0], p95=at[1], count=len(ordered))


def _sampled(one: Report) -> float:
    return one.means.acting_tokens + one.means.summary_tokens


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _mean(values: Iterable[float]) -> float:
    return fmean(listed) if (listed := list(values)) else 0.0


def _mean_of_all(values: Iterable[float | None]) -> float | None:
    """The mean; None where a value is missing, because the mean of the others is another figure."""
    listed = list(values)
    present = [value for value in listed if value is not None]
    return _mean(present) if len(present) == len(listed) else None


def _by_family(rows: Sequence[MeasuredAttempt]) -> dict[str, float]:
    names = sorted({row.family for row in rows})
    return {name: fmean(row.passed for row in rows if row.family == name) for name in names}
