"""Group-relative advantages as Dr. GRPO has them (Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783).

The idea: the mean reward of a group of attempts at one task is the baseline. Why no division by the group's standard
deviation: it blows up tiny differences where all attempts are about equally right, and weights tasks by how hard they
happen to be. Trade-off: easy and hard groups give smaller gradients than medium ones; that is wanted.

A group closes with its survivors when infrastructure lost some of its slots: the baseline is then theirs alone, and a
lost attempt is never counted as reward 0.
"""

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, one per survivor in the given order.

    The sum is exact (`math.fsum`), so the order of arrival cannot change a bit. A lone survivor, and a group whose
    rewards are all equal, get exactly 0. ValueError for an empty group or a reward that is not finite.
    """
    if not rewards:
        raise ValueError("a group without survivors has no baseline; it should have been dropped")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)  # their mean may be off by a rounding, which would look like a signal
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
