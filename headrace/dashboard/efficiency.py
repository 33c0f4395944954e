"""Where a trainer's time went in a whole run, and the work in it: steps that were taken and steps that failed."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from headrace.messages.training import Efficiency, StepDone, StepFailed


class RunEfficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a run's steps; seconds of the trainer's first process."""

    wall_s: float
    """Of all steps, failed ones included."""
    failed_s: float
    """Of the steps that failed."""
    seconds: dict[str, float]
    """By cause, as in `Efficiency.seconds`."""
    trained_tokens_per_s: float
    forwarded_tokens_per_s: float
    mfu: float | None
    """Share of the peak that trained; None where the peak is not known."""
    hfu: float | None
    """Share of the peak that computed."""
    expert_load: float
    """Of the step in which the busiest expert had most; 0 without a mixture."""


def in_order(taken: Sequence[StepDone], failed: Sequence[StepFailed]) -> list[tuple[int, Efficiency]]:
    """Step and figures of all steps of a run in their order; those of earlier versions of headrace are left out."""
    both: list[StepDone | StepFailed] = [*taken, *failed]
    outcomes = sorted(both, key=lambda outcome: (outcome.step, outcome.incarnation))
    return [(outcome.step, outcome.efficiency) for outcome in outcomes if outcome.efficiency is not None]


def of_run(taken: Sequence[StepDone], failed: Sequence[StepFailed]) -> RunEfficiency | None:
    """The sums of the steps that were taken and of those that failed; None without any."""
    steps = [efficiency for _, efficiency in in_order(taken, failed)]
    if not steps:
        return None
    lost_s = sum(efficiency.wall_s for _, efficiency in in_order((), failed))
    wall_s = sum(step.wall_s for step in steps)
    by_cause: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for cause, spent in step.seconds.items():
            by_cause[cause] += spent
    whole = Efficiency(
        seconds={cause: round(spent, 3) for cause, spent in by_cause.items()},
        wall_s=wall_s,
        trained_tokens=sum(step.trained_tokens for step in steps),
        forwarded_tokens=sum(step.forwarded_tokens for step in steps),
        model_flops=sum(step.model_flops for step in steps),
        hardware_flops=sum(step.hardware_flops for step in steps),
        # A step that raised does not tell the peak, and the devices of a run have one.
        peak_flops=max(step.peak_flops for step in steps),
    )
    figures = whole.figures()
    return RunEfficiency(
        wall_s=round(wall_s, 3),
        failed_s=round(lost_s, 3),
        seconds=whole.seconds,
        trained_tokens_per_s=round(figures["trained_tokens_per_s"], 3),
        forwarded_tokens_per_s=round(figures["forwarded_tokens_per_s"], 3),
        mfu=whole.mfu,
        hfu=whole.hfu,
        expert_load=max(step.expert_load for step in steps),
    )
