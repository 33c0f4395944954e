"""A test for a gate that may be looked at after every session; paired tasks are compared in `paired`.

Looking at a z test after every session and stopping at the first significant one finds a difference in a third of all
comparisons of equal versions. `always_valid_p` is the mixture sequential probability ratio test (Johari, Pekelis and
Walsh, arXiv 1512.04922): with probability 1 - alpha it never falls below alpha between equal versions, however often
it is computed.
"""

import math
from statistics import NormalDist

SPREAD = 0.1
"""Standard deviation of the differences in success rates that the mixture expects; any value is valid, and the test is
most sensitive to differences of about this size."""


def always_valid_p(up_a: int, n_a: int, up_b: int, n_b: int, spread: float = SPREAD) -> float:
    """One-sided p-value for "b succeeds less often than a", valid at every look. 1.0 while an arm is empty.

    Take the smallest value over all looks so far. Successes and trials of two arms whose sessions are assigned by a
    coin that does not change: a canary's share is fixed within a stage.
    """
    if not n_a or not n_b:
        return 1.0
    rate = (up_a + up_b + 1) / (n_a + n_b + 2)  # pooled, as under equality; never 0 or 1
    variance = rate * (1 - rate) * (1 / n_a + 1 / n_b)
    difference = up_b / n_b - up_a / n_a
    if difference >= 0.0:
        return 1.0
    total = variance + spread * spread
    log_ratio = 0.5 * math.log(variance / total) + 0.5 * spread * spread * difference * difference / (variance * total)
    # The mixture is symmetric, so half of what it spends is spent on this side.
    return min(1.0, math.exp(-log_ratio) / 2)


def naive_p(up_a: int, n_a: int, up_b: int, n_b: int) -> float:
    """One-sided p-value of the z test, valid for one look that was planned before: what `always_valid_p` replaces."""
    if not n_a or not n_b:
        return 1.0
    rate = (up_a + up_b + 1) / (n_a + n_b + 2)
    error = math.sqrt(rate * (1 - rate) * (1 / n_a + 1 / n_b))
    return NormalDist().cdf((up_b / n_b - up_a / n_a) / error)
