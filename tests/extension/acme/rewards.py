from headrace.algorithms.rewards import Judged


def half(judged: Judged) -> float:
    """Half a point for a pass, and the share of passed tests for the other half."""
    share = sum(test.outcome == "passed" for test in judged.tests) / max(1, len(judged.tests))
    return 0.5 * judged.passed + float(judged.options.get("share", 0.5)) * share


def broken(judged: Judged) -> float:
    raise LookupError(f"no reward for {judged.trajectory.id}")
