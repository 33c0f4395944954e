"""AdamW over the masters, by torch's own fused update function instead of its optimizer class.

`torch.optim.AdamW` imports torch's compiler with its first step: 2 s of processor time and its memory in every trainer,
also after every restart, for a compiler that nothing here calls. The function that its `step` calls is public and gives
the same bits (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

Moments may be kept in bfloat16: half of their memory, 4 of 16 to 18 bytes per parameter. They are widened to float32
piece by piece for an update and rounded to the nearest afterwards, so an update adds a few pieces of memory and its
result does not depend on the number of processes. Trade-off: eight bits of precision; a moment decays only where a
beta leaves more than the rounding, so betas above 0.99 are refused (`config.rules`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

PIECE = 1 << 22
"""Elements whose moments are widened at once; a multiple of every vector width, so pieces change no bit."""


class OptimizerSettings(NamedTuple):
    """AdamW's settings besides the learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    moments: torch.dtype = torch.float32
    """Dtype of both moments: float32 or bfloat16."""


class Moments(NamedTuple):
    """What AdamW keeps for one parameter."""

    step: Tensor
    """float32 scalar on the parameter's device: updates so far."""
    exp_avg: Tensor
    """Running mean of the gradient, of the parameter's shape; float32 or bfloat16."""
    exp_avg_sq: Tensor
    """Running mean of the squared gradient."""

    @classmethod
    def zero(cls, parameter: Tensor, dtype: torch.dtype) -> "Moments":
        """The moments of a parameter before its first update."""
        return cls(
            torch.zeros((), dtype=torch.float32, device=parameter.device),
            torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
        )

    def to(self, dtype: torch.dtype) -> "Moments":
        """These moments in a dtype; themselves where they have it."""
        return Moments(self.step, self.exp_avg.to(dtype), self.exp_avg_sq.to(dtype))


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
        kind = self.settings.moments
        for parameter in live:
            held = self.moments.get(parameter)
            self.moments[parameter] = Moments.zero(parameter, kind) if held is None else held.to(kind)
        if kind == torch.float32:
            self._update(live, [self.moments[parameter] for parameter in live], learning_rate)
            return
        for parameter in live:
            self._widened(parameter, self.moments[parameter], learning_rate)

    def _widened(self, parameter: Tensor, moments: Moments, learning_rate: float) -> None:
        """One update of a parameter whose moments are not float32, piece by piece."""
        assert parameter.grad is not None
        flat, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)
        first, second = moments.exp_avg.view(-1), moments.exp_avg_sq.view(-1)
        for start in range(0, len(flat), PIECE):
            part = slice(start, start + PIECE)
            piece = flat[part]
            piece.grad = gradient[part]
            wide = Moments(moments.step.clone(), first[part].float(), second[part].float())
            self._update([piece], [wide], learning_rate)
            first[part].copy_(wide.exp_avg)
            second[part].copy_(wide.exp_avg_sq)
        moments.step.add_(1.0)

    def _update(self, parameters: list[Tensor], moments: list[Moments], learning_rate: float) -> None:
        if not parameters:
            return
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [moment.exp_avg for moment in moments],
            [moment.exp_avg_sq for moment in moments],
            [],
            [moment.step for moment in moments],
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
