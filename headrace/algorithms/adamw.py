"""AdamW over the masters, by torch's own fused update function instead of its optimizer class.

`torch.optim.AdamW` imports torch's compiler with its first step: 900 modules and 1.3 s of processor time in every rank,
also after every restart, for a compiler that nothing here calls. The function that its `step` calls is public and gives
the same bits (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

Moments may be kept in bfloat16: half of their memory, 4 of 16 to 18 bytes per parameter; or in codes of eight bits: a
quarter (`eight_bit`). They are widened to float32 piece by piece for an update and rounded to the nearest afterwards,
so an update adds a few pieces of memory and its result does not depend on the number of processes. Trade-off: eight
bits of precision or fewer; a moment decays only where a beta leaves more than the rounding, so betas above 0.99 are
refused (`config.rules`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headrace.algorithms import eight_bit
from headrace.algorithms.eight_bit import Levels
from headrace.kernels import dispatch

PIECE = 1 << 22
"""Elements whose moments are widened at once; a multiple of every vector width, so pieces change no bit."""
_ROWS = 64
"""A piece of rows has a multiple of so many, so it too is a multiple of every vector width."""


class OptimizerSettings(NamedTuple):
    """AdamW's settings besides the learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    moments: torch.dtype = torch.float32
    """Dtype of both moments: float32, bfloat16, or uint8 for codes of eight bits."""


class Moments(NamedTuple):
    """What AdamW keeps for one parameter."""

    step: Tensor
    """float32 scalar on the parameter's device: updates so far."""
    exp_avg: Tensor
    """Running mean of the gradient, of the parameter's shape; float32, bfloat16 or codes of eight bits."""
    exp_avg_sq: Tensor
    """Running mean of the squared gradient."""
    exp_avg_scale: Tensor | None = None
    """With codes: their scales, see `eight_bit`."""
    exp_avg_sq_scale: Tensor | None = None

    @classmethod
    def zero(cls, parameter: Tensor, dtype: torch.dtype) -> "Moments":
        """The moments of a parameter before its first update."""
        wide = cls(
            torch.zeros((), dtype=torch.float32, device=parameter.device),
            torch.zeros_like(parameter, dtype=kept_as(parameter, dtype), memory_format=torch.preserve_format),
            torch.zeros_like(parameter, dtype=kept_as(parameter, dtype), memory_format=torch.preserve_format),
        )
        if wide.exp_avg.dtype != torch.uint8:
            return wide
        # Scales of 0 make every code 0.0.
        mean, square = eight_bit.scales_of(parameter), eight_bit.scales_of(parameter)
        return wide._replace(exp_avg_scale=mean, exp_avg_sq_scale=square)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, step: int, device: torch.device) -> "Moments":
        """Copies of the moments of a parameter that are named as by `tensors`. KeyError when one is missing."""
        first = tensors[f"exp_avg.{name}"]
        kinds = cls._fields[1:] if first.dtype == torch.uint8 else cls._fields[1:3]
        copies = (tensors[f"{kind}.{name}"].to(device, copy=True) for kind in kinds)
        return cls(torch.tensor(float(step), device=device), *copies)

    def rows(self) -> "Moments":
        """Views [R, n]: the rows in which blocks lie; n is 1 without blocks."""
        coded = self.exp_avg_scale is not None
        views = (None if each is None else each.view(-1, each.shape[-1] if coded else 1) for each in self[1:])
        return Moments(self.step, *views)  # type: ignore[arg-type]

    def part(self, start: int, count: int) -> "Moments":
        """Some of these rows, with a step of their own."""
        parts = (None if each is None else each[start : start + count] for each in self[1:])
        return Moments(self.step.clone(), *parts)  # type: ignore[arg-type]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors but the step, by kind and the parameter's name: exp_avg.NAME and so on."""
        return {f"{kind}.{name}": value for kind, value in zip(KINDS, self[1:], strict=True) if value is not None}


KINDS = Moments._fields[1:]
"""Names of the tensors that are kept for a parameter."""


def kept_as(parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter's moments are kept, where `dtype` is the setting."""
    return torch.float32 if dtype == torch.uint8 and not eight_bit.applies(parameter) else dtype


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay lowers a parameter, by headrace's name: a matrix, or a stack of one for each expert. Norms,
    biases (also the stacked ones of experts) and the embedding keep their size. Where the embedding is
    the head too, the head does not decay."""
    kind = name.rsplit(".", 1)[-1]
    return parameter.dim() > 1 and "embed" not in name and not kind.endswith("_bias")


class AdamW:
    """Parameters that are leaves with a `grad`, and their moments."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
        """parameters: by headrace's name, which decides whether they decay (`decays`)."""
        self._decaying = {parameter for name, parameter in parameters.items() if decays(name, parameter)}
        self.settings = settings
        self.moments: dict[Tensor, Moments] = {}
        """By parameter, from its first update on."""
        self._levels: dict[torch.device, tuple[Levels, Levels]] = {}
        """Of the first and of the second moment."""

    @torch.no_grad()
    def step(self, learning_rate: float, parameter: Tensor) -> None:
        """One update of a parameter, from its gradient."""
        decay = self.settings.weight_decay if parameter in self._decaying else 0.0
        kind, moments = kept_as(parameter, self.settings.moments), self.moments.get(parameter)
        if moments is None:
            moments = Moments.zero(parameter, kind)
        elif moments.exp_avg.dtype != kind:
            moments = self._converted(moments, parameter, kind)
        self.moments[parameter] = moments
        if kind == torch.float32:
            self._update(parameter, moments, learning_rate, decay)
        else:
            self._widened(parameter, moments, learning_rate, decay)

    def _widened(self, parameter: Tensor, moments: Moments, learning_rate: float, decay: float) -> None:
        """One update of a parameter whose moments are not float32, piece by piece."""
        assert parameter.grad is not None
        held = moments.rows()
        width = held.exp_avg.shape[-1]
        weights, gradient = parameter.detach().view(-1, width), parameter.grad.reshape(-1, width)
        count = max(_ROWS, PIECE // width // _ROWS * _ROWS)
        for start in dispatch.repeated(range(0, len(weights), count)):
            narrow = held.part(start, count)
            piece = weights[start : start + count]
            piece.grad = gradient[start : start + count]
            wide = self._wide(narrow)
            self._update(piece, wide, learning_rate, decay)
            self._narrow(wide, narrow)
        moments.step.add_(1.0)

    def _wide(self, moments: Moments) -> Moments:
        """Moments [R, n] in float32."""
        first, second = moments.exp_avg, moments.exp_avg_sq
        if moments.exp_avg_scale is None or moments.exp_avg_sq_scale is None:
            return Moments(moments.step, first.float(), second.float())
        mean, square = self._levels_on(first.device)
        return Moments(
            moments.step,
            eight_bit.dequantise(first, moments.exp_avg_scale, mean),
            eight_bit.dequantise(second, moments.exp_avg_sq_scale, square),
        )

    def _narrow(self, wide: Moments, into: Moments) -> None:
        """Write float32 moments [R, n] into those that are kept."""
        if into.exp_avg_scale is None or into.exp_avg_sq_scale is None:
            into.exp_avg.copy_(wide.exp_avg)
            into.exp_avg_sq.copy_(wide.exp_avg_sq)
            return
        mean, square = self._levels_on(into.exp_avg.device)
        for value, levels, codes, scales in (
            (wide.exp_avg, mean, into.exp_avg, into.exp_avg_scale),
            (wide.exp_avg_sq, square, into.exp_avg_sq, into.exp_avg_sq_scale),
        ):
            made = eight_bit.quantise(value, levels)
            codes.copy_(made[0])
            scales.copy_(made[1])

    def _converted(self, moments: Moments, parameter: Tensor, kind: torch.dtype) -> Moments:
        """These moments in another dtype: the setting has changed."""
        made, wide = Moments.zero(parameter, kind)._replace(step=moments.step), self._wide(moments.rows())
        rows = made.rows()
        shape = rows.exp_avg.shape
        self._narrow(Moments(wide.step, wide.exp_avg.view(shape), wide.exp_avg_sq.view(shape)), rows)
        return made

    def _levels_on(self, device: torch.device) -> tuple[Levels, Levels]:
        if device not in self._levels:
            self._levels[device] = Levels.on(device, signed=True), Levels.on(device, signed=False)
        return self._levels[device]

    def _update(self, parameter: Tensor, moments: Moments, learning_rate: float, decay: float) -> None:
        assert parameter.grad is not None
        adamw(
            [parameter],
            [parameter.grad],
            [moments.exp_avg],
            [moments.exp_avg_sq],
            [],
            [moments.step],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=learning_rate,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )
