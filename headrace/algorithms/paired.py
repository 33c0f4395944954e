"""Statistics of a benchmark over tasks, because the trials of one task are not independent.

The task is the unit: its value is the share of its trials that passed, or a mean figure of its trials. Intervals are
those of Agresti and Coull (1998) and Agresti and Min (2005), extended from passes to shares: pseudo-tasks are added, so
that an interval keeps its level with few tasks, with tasks that all pass, and with tasks that never differ.
"""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import msgspec

POWER = 0.8
"""The probability with which a difference of the detectable size is found."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks with its confidence interval. Without tasks the interval is the whole range, never NaN."""

    mean: float
    low: float
    high: float
    tasks: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The mean difference of two policies over the tasks that both were measured on, the second minus the first."""

    mean: float
    low: float
    high: float
    tasks: int
    won: int
    """Tasks on which the second did better."""
    lost: int
    detectable: float
    """The smallest true difference that this measurement finds with probability `POWER`."""

    @property
    def silent(self) -> bool:
        """Whether the interval holds 0: the two cannot be told apart."""
        return self.low <= 0.0 <= self.high


def share_interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """The mean of the tasks' shares, each from 0 to 1. The interval has four pseudo-tasks: two that always pass and two
    that never do."""
    tasks = len(values)
    if not tasks:
        return Interval(mean=0.0, low=0.0, high=1.0, tasks=0)
    total = tasks + 4
    middle = (sum(values) + 2) / total
    spread = (sum(value * value for value in values) + 2) / total - middle * middle
    reach = NormalDist().inv_cdf(1 - alpha / 2) * math.sqrt(max(0.0, spread) / total)
    return Interval(mean=sum(values) / tasks, low=max(0.0, middle - reach), high=min(1.0, middle + reach), tasks=tasks)


def paired_difference(first: Mapping[str, float], second: Mapping[str, float], alpha: float = 0.05) -> Difference:
    """Compare two policies on their common tasks: task to the share of its trials that passed.

    The interval has two pseudo-tasks: half a win, half a loss and one tie. Without common tasks it is the whole range.
    """
    common = sorted(first.keys() & second.keys())
    differences = [float(second[task]) - float(first[task]) for task in common]
    if not common:
        return Difference(mean=0.0, low=-1.0, high=1.0, tasks=0, won=0, lost=0, detectable=1.0)
    total = len(common) + 2
    middle = sum(differences) / total
    spread = (sum(each * each for each in differences) + 1) / total - middle * middle
    error = math.sqrt(spread / total)
    reach = NormalDist().inv_cdf(1 - alpha / 2)
    return Difference(
        mean=sum(differences) / len(common),
        low=max(-1.0, middle - reach * error),
        high=min(1.0, middle + reach * error),
        tasks=len(common),
        won=sum(each > 0 for each in differences),
        lost=sum(each < 0 for each in differences),
        detectable=min(1.0, (reach + NormalDist().inv_cdf(POWER)) * error),
    )


def all_pass(passed: int, trials: int, k: int) -> float:
    """pass^k: the probability that k trials, drawn without replacement from a task's `trials`, all passed.

    ValueError unless 1 <= k <= trials.
    """
    if not 0 < k <= trials:
        raise ValueError(f"expected 1 <= k <= {trials} trials, got {k}")
    return math.comb(passed, k) / math.comb(trials, k)


def silent_share(outcomes: Mapping[str, Sequence[bool]], resamples: int, seed: int, alpha: float = 0.05) -> float:
    """The share of resamples in which a policy, compared with itself, shows no difference.

    Each resample simulates two measurements of one policy: it draws tasks with replacement, and for each arm as many
    trials of a task as were recorded, from that task's outcomes. With a sound comparison the share is at least 1 -
    alpha.
    """
    rng = random.Random(seed)
    tasks = [list(map(bool, trials)) for trials in outcomes.values() if trials]
    if not tasks or resamples < 1:
        return 1.0
    silent = 0
    for _ in range(resamples):
        arms: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for number, trials in enumerate(rng.choices(tasks, k=len(tasks))):
            for arm in arms:
                arm[str(number)] = sum(rng.choices(trials, k=len(trials))) / len(trials)
        silent += paired_difference(*arms, alpha).silent
    return silent / resamples
