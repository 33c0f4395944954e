import msgspec

from headrace.algorithms.rewards import Judged


class Half(msgspec.Struct):
    """`[algorithm.options.reward]`."""

    share: float = 0.5


def half(judged: Judged, options: Half) -> float:
    """Half a point for a pass, and the share of passed tests for the other half."""
    share = sum(test.outcome == "passed" for test in judged.tests) / max(1, len(judged.tests))
    return 0.5 * judged.passed + options.share * share


def broken(judged: Judged) -> float:
    raise LookupError(f"no reward for {judged.trajectory.id}")
