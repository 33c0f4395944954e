"""A run's figures in words: whether the policy learnt, what limited the speed, what to try next."""

import math
import statistics
from collections.abc import Sequence

from headrace.dashboard.records import EvaluatedAttempts
from headrace.dashboard.report import RunReport
from headrace.messages.training import StepDone

ENDS = 5
"""Steps at a run's beginning and end whose means are compared."""
Z = 1.96
"""Standard errors to each end of a 95 % interval."""


def learnt(before: EvaluatedAttempts | None, after: EvaluatedAttempts | None) -> str:
    """Whether more held-out tasks are solved than before, with the interval of the paired difference over tasks."""
    tasks = sorted(before.scores.keys() & after.scores.keys()) if before and after else []
    if len(tasks) < 2 or before is None or after is None:
        return "Whether it learnt was not measured: held-out tasks were not evaluated both before and after training."
    first = [before.scores[task].passed for task in tasks]
    last = [after.scores[task].passed for task in tasks]
    changes = [now - then for then, now in zip(first, last, strict=True)]
    change = statistics.fmean(changes)
    around = Z * statistics.stdev(changes) / math.sqrt(len(tasks))
    low, high = change - around, change + around
    verdict = "It learnt" if low > 0 else "It got worse" if high < 0 else "It is not certain that it learnt"
    return (
        f"{verdict}: at temperature 1 it passes {sum(last)} of {len(tasks)} held-out tasks, {sum(first)} before "
        f"training ({change:+.2f}, 95 % interval {low:+.2f} to {high:+.2f})."
    )


def limit(report: RunReport) -> str:
    """The cause that takes most of the steps' time."""
    spent = report.efficiency
    if spent is None or not spent.wall_s:
        return "No step was taken, so nothing is known of the speed."
    shares = {cause: seconds / spent.wall_s for cause, seconds in spent.seconds.items()}
    cause = max(shares, key=lambda name: shares[name])
    if cause == "batch":
        bound = "sampling" if report.rollout_busy >= 0.7 else "sandboxes, judges or the bound of staleness"
        return (
            f"The trainer waited for batches {_percent(shares[cause])} of its time and the samplers were busy "
            f"{_percent(report.rollout_busy)}: {bound} limited the speed."
        )
    what = {"busy": "computed", "rescore": "scored trajectories again"}.get(cause, f"spent its time on {cause}")
    return f"The trainer {what} {_percent(shares[cause])} of its time: the trainer limited the speed."


def next_steps(report: RunReport, steps: Sequence[StepDone]) -> list[str]:
    """Advice that follows from the figures, most urgent first."""
    advice = []
    if not report.ledger.balanced:
        advice.append("The audit does not balance: `headrace audit` prints each sentence of its proof that fails.")
    if report.failed_steps:
        advice.append(f"{report.failed_steps} steps failed: their reasons stand under Errors.")
    if report.mismatch_alarms:
        advice.append("Sampler and trainer disagreed: docs/runbooks.md says how to find out why.")
    if len(steps) >= 3 * ENDS:
        rates, entropies = [step.pass_rate for step in steps], [step.entropy for step in steps]
        if _mean(entropies[-ENDS:]) < 0.2 * _mean(entropies[:ENDS]) and _mean(rates[-ENDS:]) < 0.8:
            advice.append("Entropy fell below a fifth of its start: lower [algorithm] learning_rate.")
        if _mean(rates[-ENDS:]) > 0.9:
            advice.append("Nearly every attempt passes: harder tasks have more to teach (`headrace tasks probe`).")
        elif _mean(rates[-ENDS:]) > _mean(rates[-2 * ENDS : -ENDS]) + 0.02:
            advice.append("The pass rate still rises: resume the run with more [curriculum] steps.")
    unseen = report.unseen_templates
    if unseen.before is not None and unseen.after_t1 is not None and report.heldout_before is not None:
        gain = (report.heldout_after_t1 or 0.0) - report.heldout_before
        if gain > 0.1 and unseen.after_t1 - unseen.before < gain / 3:
            advice.append("Other kinds of tasks gained less than a third: train on more kinds of tasks.")
    if report.efficiency is not None and report.efficiency.seconds.get("batch", 0.0) > 0.5 * report.efficiency.wall_s:
        advice.append("The trainer waits for batches: add rollout actors, engines or processors.")
    return advice or ["The figures suggest nothing in particular."]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
