"""A benchmark as evaluations: one EvalRequest per trial of the suite, and the pass share of each task."""

from collections.abc import Sequence

import msgspec

from headrace.messages.evaluation import EvalRequest, EvalResult


def trial_id(id: str, trial: int) -> str:
    """The id of one trial's evaluation; the first trial has the benchmark's own."""
    return id if trial == 0 else f"{id}-t{trial}"


def requests(first: EvalRequest, trials: int) -> list[EvalRequest]:
    """One evaluation per trial. first: that of trial 0, whose id is the benchmark's."""
    return [msgspec.structs.replace(first, id=trial_id(first.id, trial), seed=trial) for trial in range(trials)]


def shares(results: Sequence[EvalResult]) -> dict[str, float]:
    """Task to the share of its trials that passed; trials that infrastructure failed are left out."""
    passes: dict[str, list[bool]] = {}
    for result in results:
        for task, passed in result.passes.items():
            passes.setdefault(task, []).append(passed)
    return {task: sum(each) / len(each) for task, each in passes.items()}
