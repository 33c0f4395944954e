from collections.abc import Sequence


def best_of(rewards: Sequence[float]) -> list[float]:
    """1 for the best attempts, 0 for the others."""
    return [float(reward == max(rewards) and reward > min(rewards)) for reward in rewards]
