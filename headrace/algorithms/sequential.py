"""A sequential test for the gate, valid after every session; `paired` compares policies on paired tasks.

A z test that is computed after every session and stops at the first significant value finds a difference in a third of
all comparisons of equal versions. `always_valid_p` is the mixture sequential probability ratio test (Johari, Pekelis
and Walsh, arXiv 1512.04922): between equal versions it stays above alpha with probability 1 - alpha, however often it
is computed.
"""

import math
from statistics import NormalDist

SPREAD = 0.1
"""Standard deviation of the differences in success rates that the mixture expects; any value is valid, and the test is
most sensitive to differences of about this size."""


def always_valid_p(up_a: int, n_a: int, up_b: int, n_b: int, spread: float = SPREAD) -> float:
    """One-sided p-value for "b succeeds less often than a", valid after any number of sessions. 1.0 while an arm is
    empty.

    up_a of n_a sessions of one arm succeeded, up_b of n_b of the other. The probability with which a session is
    assigned to an arm must be constant: a canary's share is fixed within a stage. Use the smallest value so far.
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
    # The mixture is symmetric: half of its error probability is on this side.
    return min(1.0, math.exp(-log_ratio) / 2)


def naive_p(up_a: int, n_a: int, up_b: int, n_b: int) -> float:
    """One-sided p-value of the z test, valid once, at a sample size that was planned. `always_valid_p` replaces it."""
    if not n_a or not n_b:
        return 1.0
    rate = (up_a + up_b + 1) / (n_a + n_b + 2)
    error = math.sqrt(rate * (1 - rate) * (1 / n_a + 1 / n_b))
    return NormalDist().cdf((up_b / n_b - up_a / n_a) / error)
