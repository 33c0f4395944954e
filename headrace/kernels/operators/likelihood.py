"""Log-probabilities of chosen tokens straight from hidden states."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels import selected_logprob as twin


@torch.library.custom_op("headrace::selected_logprob", mutates_args=(), device_types="cpu")
def _selected(
    hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return twin.selected_forward(hidden, weight, targets, heat, exact)


@_selected.register_kernel("cuda")
def _(hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    return twin.selected_logprob_triton(hidden, weight, targets, heat)


@_selected.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (hidden.new_empty(targets.shape[0], dtype=torch.float32) for _ in range(3))
    return a, b, c


@torch.library.custom_op("headrace::selected_logprob_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, lse: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    g_hidden, g_weight = twin.selected_backward(grad, hidden, weight, targets, heat, lse, learns)
    return g_hidden, weight.new_empty(0) if g_weight is None else g_weight


@_backward.register_kernel("cuda")
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, lse: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    return twin.selected_logprob_backward_triton(grad, hidden, weight, targets, heat, lse, learns)


@_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor, lse: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight) if learns else weight.new_empty(0)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(*inputs[:4], output[2])


def _pull(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, heat, lse = ctx.saved_tensors
    learns = ctx.needs_input_grad[1]
    pulled = torch.ops.headrace.selected_logprob_backward(grad, hidden, weight, targets, heat, lse, learns)
    return pulled[0], pulled[1] if learns else None, None, None, None


_selected.register_autograd(_pull, setup_context=_keep)


def selected_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, exact: bool
) -> tuple[Tensor, Tensor]:
    """hidden [M, D], weight [V, D], targets [M] int64 -> (log-probability, entropy), float32 [M].

    temperature: a number, or a tensor with one per row; 0 scores as 1. Gradients reach hidden and weight.
    """
    if dispatch.twin(hidden):
        return twin.selected_logprob(hidden, weight, targets, temperature, exact)
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device)
    heat = heat.expand(targets.shape[0]).contiguous()
    logp, entropy, _ = torch.ops.headrace.selected_logprob(hidden, weight, targets, heat, exact)
    return logp, entropy
