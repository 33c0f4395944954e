"""What a step must not do to the weights: the reasons for which it is refused.

The idea: a refused step costs one batch, a poisoned one the run. The check comes before the update, so the old bytes
are still there. k1 is the early alarm: with stale samples at a high learning rate it rose before each collapse seen.
"""

import math


def refusal(
    loss: float, gradient_norm: float, k1: float, *, max_gradient_norm: float = 0.0, max_k1: float = 0.0
) -> str:
    """Why an update may not be made, in snake_case; empty when it may. A limit of 0 is no limit."""
    if not math.isfinite(loss):
        return "loss_not_finite"
    if not math.isfinite(gradient_norm):
        return "gradient_not_finite"
    if not math.isfinite(k1):
        return "mismatch_not_finite"
    if max_gradient_norm and gradient_norm > max_gradient_norm:
        return "gradient_spike"
    if max_k1 and abs(k1) > max_k1:
        return "mismatch_too_large"
    return ""
