"""Group-relative advantages; the default is that of Dr. GRPO (arXiv 2503.20783, "Understanding R1-Zero-Like Training").

The idea: the mean reward of a group of attempts at one task is the baseline. By default nothing is divided by the
group's standard deviation: the division enlarges tiny differences where all attempts are about equally right, and gives
very easy and very hard tasks more weight. Trade-off: easy and hard groups give smaller gradients than medium ones.
`normalised` divides (GRPO); `leave_one_out` is RLOO.

A group closes with its survivors when infrastructure lost some of its slots: the baseline is then that of the
survivors, and a lost attempt never counts as reward 0. Groups may have any size from 2 on.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory

EPSILON = 1e-6
"""Added to a group's standard deviation."""


class Attempt(NamedTuple):
    """One attempt of a group with the reward that is compared: its final reward, or the reward of one turn."""

    reward: float
    trajectory: Trajectory
    score: Score
    turn: int | None = None
    """The turn whose reward it is; None for the final reward."""


Advantage = Callable[[Sequence[Attempt]], list[float]]
"""What `registry.ADVANTAGES` holds: one number for each attempt of a group; 0.0 means that it has no gradient."""


def mean(group: Sequence[Attempt]) -> list[float]:
    """Dr. GRPO: the reward minus the group's mean."""
    return group_advantages([attempt.reward for attempt in group])


def normalised(group: Sequence[Attempt]) -> list[float]:
    """GRPO (arXiv 2402.03300): divided by the group's standard deviation."""
    return normalised_advantages([attempt.reward for attempt in group])


def leave_one_out(group: Sequence[Attempt]) -> list[float]:
    """RLOO (arXiv 2402.14740): the reward minus the mean of the others."""
    return leave_one_out_advantages([attempt.reward for attempt in group])


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, one per reward. All 0.0 when the rewards are equal.

    ValueError for an empty group and for a reward that is not finite.
    """
    if not rewards:
        raise ValueError(
            "expected at least one reward for a group's baseline, got none: a group without survivors is dropped"
        )
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)  # their mean may be off by a rounding error, which would look like a signal
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def normalised_advantages(rewards: Sequence[float]) -> list[float]:
    """`group_advantages` divided by the group's standard deviation. ValueError as there."""
    centred = group_advantages(rewards)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + EPSILON) for value in centred]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others. ValueError as in `group_advantages`."""
    centred = group_advantages(rewards)
    scale = len(centred) / (len(centred) - 1) if len(centred) > 1 else 1.0
    return [value * scale for value in centred]


def to_go(advantages: Sequence[float]) -> list[float]:
    """The sum of each turn's and all later turns' advantages: what the tokens of a turn led to.

    DeepSeekMath's process supervision (arXiv 2402.03300, section 4.1.3): the rewards of all turns of a group are one
    pool with one baseline, and a token's advantage is the sum over its own and the following turns. With
    `normalised` it is that formula exactly; the default does not divide by the deviation, for the reason
    above. The advantage of the final reward is added to every token, as MT-GRPO adds the two (arXiv 2505.11821).
    """
    sums: list[float] = []
    for value in reversed(advantages):
        sums.append(value + (sums[-1] if sums else 0.0))
    return sums[::-1]


def class_advantages(attempts: Sequence[Attempt], advantage: Advantage = mean) -> list[float]:
    """Advantages where every prompt has one rollout: the baseline is the batch's other rollouts of the same task class.

    All classes with a single rollout share one baseline.
    """
    sizes = Counter(attempt.trajectory.family for attempt in attempts)
    pools: dict[str, list[int]] = {}
    for place, attempt in enumerate(attempts):
        family = attempt.trajectory.family
        pools.setdefault(family if sizes[family] > 1 else "", []).append(place)
    values = [0.0] * len(attempts)
    for members in pools.values():
        for place, value in zip(members, advantage([attempts[member] for member in members]), strict=True):
            values[place] = value
    return values
