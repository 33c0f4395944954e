"""Reward shaping: the verdict minus a concave price for effort (Composer 2, arXiv 2603.24477, section 4.1).

    C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)),   q = 1: log(1 + kx) / k

Concave and increasing with slope 1 at 0: the first tokens of an easy task cost the most, a long hard one is not choked.
x is a weighted sum of sampled tokens, tool calls and turns. A turn costs more than a call, so calls that may run
together are cheaper in one turn: that is how parallel calls are taught.
"""

import math

TOKENS_PER_CALL = 4.0
TOKENS_PER_TURN = 16.0


def concave(x: float, k: float, q: float) -> float:
    """C_{k,q}(x) for x >= 0, k > 0, q >= 0. ValueError outside."""
    if x < 0.0 or k <= 0.0 or q < 0.0:
        raise ValueError(f"concave penalty needs x >= 0, k > 0, q >= 0, got x={x}, k={k}, q={q}")
    if q == 1.0:
        return math.log1p(k * x) / k
    return math.expm1((1.0 - q) * math.log1p(k * x)) / (k * (1.0 - q))


def effort(tokens: int, calls: int, turns: int) -> float:
    """x of the penalty, in sampled tokens."""
    return tokens + TOKENS_PER_CALL * calls + TOKENS_PER_TURN * turns


def shaped_reward(
    passed: bool, *, tokens: int, calls: int, turns: int, weight: float = 0.0, k: float = 0.01, q: float = 0.5
) -> float:
    """1 or 0 for the verdict, minus weight x C_{k,q}(effort). weight 0 gives the verdict alone."""
    reward = 1.0 if passed else 0.0
    return reward - weight * concave(effort(tokens, calls, turns), k, q) if weight else reward
