"""Advantages and losses by name: the built-in ones and those that users register (`headrace.registry`).

An advantage maps the rewards of one group to one number each: ``(rewards: Sequence[float]) -> list[float]``; 0.0 means
that the slot has no gradient. A loss maps sampled tokens to the terms whose sum is raised: `corrections.Loss`.
`[algorithm] advantage` and `[algorithm] weighting` name them in the TOML.
"""

from collections.abc import Callable, Sequence

from headrace.algorithms.corrections import Loss
from headrace.registry import Registry

Advantage = Callable[[Sequence[float]], list[float]]

ADVANTAGES: Registry[Advantage] = Registry(
    "advantages",
    {
        "mean": "headrace.algorithms.advantages:group_advantages",
        "normalised": "headrace.algorithms.advantages:normalised_advantages",
        "leave_one_out": "headrace.algorithms.advantages:leave_one_out_advantages",
    },
)
LOSSES: Registry[Loss] = Registry(
    "losses",
    {
        name: f"headrace.algorithms.corrections:{name}"
        for name in ("truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked")
    },
)
