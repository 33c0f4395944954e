from collections.abc import Sequence


def best_of(rewards: Sequence[float]) -> list[float]:
    """The best attempts teach, and the others do not."""
    return [float(reward == max(rewards) and reward > min(rewards)) for reward in rewards]
