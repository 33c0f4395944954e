from collections.abc import Sequence

from headrace.algorithms.advantages import Attempt


def best_of(group: Sequence[Attempt]) -> list[float]:
    """1 for the best attempts, 0 for the others."""
    rewards = [attempt.reward for attempt in group]
    return [float(reward == max(rewards) and reward > min(rewards)) for reward in rewards]
