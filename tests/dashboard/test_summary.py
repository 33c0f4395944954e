"""The sentences of a report follow from its figures."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headrace.dashboard import summary
from headrace.dashboard.efficiency import RunEfficiency
from headrace.dashboard.records import EvaluatedAttempts
from headrace.dashboard.report import RunReport, UnseenTemplates
from headrace.messages.training import StepDone
from headrace.replay.audit import AuditReport
from tests.support import records


def evaluated(passed: list[bool]) -> EvaluatedAttempts:
    scores = {f"t{number}": records.score("e1-000000", number, passed=each) for number, each in enumerate(passed)}
    return EvaluatedAttempts(scores=scores)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "interval"),
    [
        (63 * [True] + 137 * [False], 59 * [True] + 4 * [False] + 124 * [True] + 13 * [False], "learnt", (0.53, 0.67)),
        (10 * [True] + 10 * [False], 9 * [True] + [False] + 2 * [True] + 8 * [False], "is not certain", (-0.12, 0.22)),
        (50 * [True] + 50 * [False], 100 * [False], "got worse", (-0.60, -0.40)),
        (20 * [True], 20 * [True], "is not certain", (0.0, 0.0)),
    ],
)
def test_a_run_learnt_where_the_whole_interval_is_above_zero(
    before: list[bool], after: list[bool], verdict: str, interval: tuple[float, float]
) -> None:
    told = summary.learnt(evaluated(before), evaluated(after))
    low, high = interval
    assert f"It {verdict}" in told and f"95 % interval {low:+.2f} to {high:+.2f}" in told
    assert f"{sum(after)} of {len(after)}" in told and f"{sum(before)} before" in told


def test_without_two_evaluations_nothing_is_claimed() -> None:
    measured = evaluated([True, False])
    for before, after in ((None, measured), (measured, None), (measured, evaluated([]))):
        assert summary.learnt(before, after).startswith("Whether it learnt was not measured")


def nothing(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """None for every field."""
    return dict.fromkeys(kind.__struct_fields__)


def report(seconds: dict[str, float] | None = None, rollout_busy: float = 0.9, **changes: Any) -> RunReport:
    """A report with these figures and no others."""
    empty, audit = nothing(RunReport), nothing(AuditReport)
    unseen = UnseenTemplates(tasks=0, before=None, before_greedy=None, after_t1=None, after_greedy=None)
    spent = seconds and RunEfficiency(
        wall_s=sum(seconds.values()),
        failed_s=0.0,
        seconds=seconds,
        trained_tokens_per_s=0.0,
        forwarded_tokens_per_s=0.0,
        mfu=None,
        hfu=None,
        expert_load=0.0,
    )
    fixed = {
        "efficiency": spent,
        "rollout_busy": rollout_busy,
        "unseen_templates": unseen,
        "ledger": AuditReport(**(audit | {"balanced": True})),
    }
    return RunReport(**(empty | {"failed_steps": 0, "mismatch_alarms": 0} | fixed | changes))


@pytest.mark.parametrize(
    ("seconds", "busy", "bound"),
    [
        ({"batch": 80.0, "busy": 20.0}, 0.9, "sampling limited the speed"),
        ({"batch": 80.0, "busy": 20.0}, 0.3, "sandboxes, judges or the bound of staleness limited the speed"),
        ({"batch": 10.0, "busy": 90.0}, 0.3, "computed 90 % of its time: the trainer limited the speed"),
        ({"batch": 10.0, "checkpoint": 90.0}, 0.3, "on checkpoint 90 % of its time: the trainer limited the speed"),
        (None, 0.0, "nothing is known of the speed"),
    ],
)
def test_the_largest_cause_of_a_steps_time_bounds_the_speed(
    seconds: dict[str, float] | None, busy: float, bound: str
) -> None:
    assert bound in summary.limit(report(seconds, busy))


def steps(rates: list[float], entropy: tuple[float, float] = (0.2, 0.1)) -> list[StepDone]:
    first, last = entropy
    done = [records.done(number, [], 0) for number in range(len(rates))]
    return [
        msgspec.structs.replace(step, pass_rate=rate, entropy=first + (last - first) * number / max(len(rates) - 1, 1))
        for number, (step, rate) in enumerate(zip(done, rates, strict=True))
    ]


def test_advice_follows_from_the_curves() -> None:
    def about(word: str, steps: Sequence[StepDone], **changes: Any) -> bool:
        return any(word in text for text in summary.next_steps(report(**changes), steps))

    rising = [0.3 + 0.02 * number for number in range(20)]
    assert about("still rises", steps(rising)) and not about("still rises", steps(20 * [0.5]))
    assert about("harder tasks", steps(20 * [0.95])) and not about("still rises", steps(20 * [0.95]))
    assert about("Entropy", steps(20 * [0.5], (0.2, 0.001))) and not about("Entropy", steps(20 * [0.95], (0.2, 0.001)))
    assert about("waits for batches", [], seconds={"batch": 6.0, "busy": 4.0})
    assert about("steps failed", [], failed_steps=2) and about("disagreed", [], mismatch_alarms=1)
    assert summary.next_steps(report(), []) == ["The figures suggest nothing in particular."]
