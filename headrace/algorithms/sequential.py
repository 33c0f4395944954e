"""A sequential test for the gate, valid after every session; `paired` compares policies on paired tasks.

Idea: chance assigns a session to the candidate with a known probability, the canary's share. If both versions succeed
equally often, the outcome says nothing about the arm: of the failures, and of the successes, exactly that share is the
candidate's. So each session contributes the likelihood ratio of its arm, given its outcome, under a candidate that is
worse against that share. The product is an e-process: a nonnegative martingale between equal versions, and a
supermartingale for a better candidate. By Ville's inequality it ever exceeds 1 / alpha with probability alpha at most,
at every rate of success and every share, however often it is looked at. No normal approximation is involved. Ratios of
several rates are averaged, which keeps the property. Methods: Grünwald, de Heide and Koolen, "Safe Testing" (2024);
Turner, Ly and Grünwald, "Generic E-variables for exact sequential k-sample tests" (2024).
"""

import math
from itertools import product

RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.99)
"""Success rates of the promoted version among the averaged alternatives. Any choice is valid."""
HARMS = (0.1, 0.1, 0.1, 0.1, 0.3)
"""How much less often the candidate succeeds in the alternatives. The test is most sensitive to the frequent value."""
_ALTERNATIVES = tuple((rate, rate - harm) for rate, harm in product(RATES, HARMS) if rate - harm > 0.005)


def log_evidence(up_a: int, n_a: int, up_b: int, n_b: int, share: float) -> float:
    """Natural logarithm of the e-value against "b succeeds at least as often as a", after any number of sessions.

    up_a of n_a sessions of one arm succeeded, up_b of n_b of the other. share: the probability, in (0, 1), with which
    each of these sessions was assigned to b; 0.0 comes back for a share outside, because nothing is compared. Evidence
    of several stages, each with a share of its own, is added. `p_value` turns it into a p-value.
    """
    if not 0.0 < share < 1.0:
        return 0.0
    down_a, down_b = n_a - up_a, n_b - up_b
    ratios = []
    for rate_a, rate_b in _ALTERNATIVES:
        ratio = 0.0
        for a, b, like_a, like_b in ((up_a, up_b, rate_a, rate_b), (down_a, down_b, 1 - rate_a, 1 - rate_b)):
            pooled = share * like_b + (1 - share) * like_a
            ratio += a * math.log(like_a / pooled) + b * math.log(like_b / pooled)
        ratios.append(ratio)
    highest = max(ratios)
    return highest + math.log(math.fsum(math.exp(ratio - highest) for ratio in ratios) / len(ratios))


def p_value(evidence: float) -> float:
    """The p-value of an e-value's logarithm, valid after any number of sessions. Use the smallest one so far."""
    return math.exp(-max(0.0, evidence))
