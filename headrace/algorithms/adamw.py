"""AdamW over the masters, by torch's own fused update function instead of its optimizer class.

`torch.optim.AdamW` imports torch's compiler with its first step: 2 s of processor time and its memory in every trainer,
also after every restart, for a compiler that nothing here calls. The function that its `step` calls is public and gives
the same bits (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class OptimizerSettings(NamedTuple):
    """AdamW's settings besides the learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0


class Moments(NamedTuple):
    """What AdamW keeps for one parameter."""

    step: Tensor
    """float32 scalar on the parameter's device: updates so far."""
    exp_avg: Tensor
    """Running mean of the gradient, of the parameter's shape and dtype."""
    exp_avg_sq: Tensor
    """Running mean of the squared gradient."""

    @classmethod
    def zero(cls, parameter: Tensor) -> "Moments":
        """The moments of a parameter before its first update."""
        return cls(
            torch.zeros((), dtype=torch.float32, device=parameter.device),
            torch.zeros_like(parameter, memory_format=torch.preserve_format),
            torch.zeros_like(parameter, memory_format=torch.preserve_format),
        )


class AdamW:
    """Parameters that are leaves with a `grad`, and their moments."""

    def __init__(self, parameters: Iterable[Tensor], settings: OptimizerSettings) -> None:
        self.parameters = list(parameters)
        self.settings = settings
        self.moments: dict[Tensor, Moments] = {}
        """By parameter, from its first update on."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter that has a gradient."""
        live = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not live:
            return
        for parameter in live:
            if parameter not in self.moments:
                self.moments[parameter] = Moments.zero(parameter)
        moments = [self.moments[parameter] for parameter in live]
        adamw(
            live,
            [parameter.grad for parameter in live if parameter.grad is not None],
            [one.exp_avg for one in moments],
            [one.exp_avg_sq for one in moments],
            [],
            [one.step for one in moments],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=learning_rate,
            weight_decay=self.settings.weight_decay,
            eps=1e-8,
            maximize=False,
        )
