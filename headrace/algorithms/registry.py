"""Advantages and losses by name: the built-in ones and those that users register (`headrace.registry`).

An advantage maps the attempts of one group to one number each (`advantages.Advantage`), a loss sampled tokens to the
terms whose sum is raised (`corrections.Loss`). `[algorithm] advantage` and `[algorithm] weighting` name them in the
TOML, `[algorithm.options.advantage]` and `[algorithm.options.loss]` have their options.
"""

from headrace.algorithms.advantages import Advantage
from headrace.algorithms.corrections import Loss
from headrace.registry import Registry

ADVANTAGES: Registry[Advantage] = Registry(
    "advantages",
    {
        "mean": "headrace.algorithms.advantages:mean",
        "normalised": "headrace.algorithms.advantages:normalised",
        "leave_one_out": "headrace.algorithms.advantages:leave_one_out",
    },
)
LOSSES: Registry[Loss] = Registry(
    "losses",
    {
        name: f"headrace.algorithms.corrections:{name}"
        for name in ("truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked")
    },
)
