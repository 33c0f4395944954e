"""The optimizer's settings, and the learning rate of a step: warm-up, then constant, linear decay or cosine decay.

The rate depends on the number of updates that the optimizer has made and on the recipe alone, so a replayed step gets
the rate of the recorded one. Cosine decay: Loshchilov & Hutter, arXiv 1608.03983, without restarts.
"""

import math

import torch

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import Algorithm

LEAST_RATE = 0.1
"""Share of the peak rate at which the schedules linear and cosine end, in mid-training too."""
BETA1 = 0.9
"""AdamW's decay of the mean of gradients, per update."""


def learning_rate(algorithm: Algorithm, step: int) -> float:
    """The rate of update number `step`, counted from 0.

    Warm-up rises over `warmup_steps`. After it, `linear` and `cosine` fall over `decay_steps` to `LEAST_RATE` times the
    peak and stay there.
    """
    peak = algorithm.learning_rate
    if algorithm.schedule == "constant" or step < algorithm.warmup_steps:
        return peak * min(1.0, (step + 1) / max(1, algorithm.warmup_steps))
    done = min(1.0, (step - algorithm.warmup_steps + 1) / algorithm.decay_steps)
    share = 1.0 - done if algorithm.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return peak * (LEAST_RATE + (1.0 - LEAST_RATE) * share)


def optimizer_settings(algorithm: Algorithm) -> OptimizerSettings:
    """AdamW's settings of a recipe."""
    moments = {"float32": torch.float32, "bfloat16": torch.bfloat16, "eight_bit": torch.uint8}[algorithm.moments]
    return OptimizerSettings((BETA1, algorithm.beta2), algorithm.weight_decay, moments)
