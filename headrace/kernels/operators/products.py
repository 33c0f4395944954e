"""Products by a matrix, and root mean square norms."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import batch_invariant, dispatch
from headrace.kernels.elementwise.norm import rms_norm_backward_triton


@torch.library.custom_op("headrace::linear", mutates_args=(), device_types="cpu")
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return batch_invariant.linear_forward(x, weight).contiguous()


@_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return batch_invariant.linear_triton(x, weight)


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("headrace::linear_backward", mutates_args=(), device_types="cpu")
def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    g_x, g_weight = batch_invariant.linear_backward(grad, x, weight, learns)
    return g_x.contiguous(), weight.new_empty(0) if g_weight is None else g_weight


@_linear_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, weight: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    # No fixed order over the batch is needed here.
    return grad.mm(weight), grad.t().mm(x) if learns else weight.new_empty(0)


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    g_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return g_x, torch.empty_like(weight) if learns else weight.new_empty(0)


def _keep_linear(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _pull_linear(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    learns = ctx.needs_input_grad[1]
    g_x, g_weight = torch.ops.headrace.linear_backward(grad, *ctx.saved_tensors, learns)
    return g_x, g_weight if learns else None


_linear.register_autograd(_pull_linear, setup_context=_keep_linear)


def linear(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """x [M, K] @ weight [N, K].T; where exact, a row's bits do not depend on M, elsewhere it is F.linear."""
    if dispatch.twin(x):
        return batch_invariant.linear(x, weight, exact)
    if not exact:
        return F.linear(x, weight)
    out: Tensor = torch.ops.headrace.linear(x, weight)
    return out


@torch.library.custom_op("headrace::rms_norm", mutates_args=(), device_types="cpu")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return batch_invariant.rms_norm_forward(x.contiguous(), weight, eps)


@_rms_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return batch_invariant.rms_norm_triton(x, weight, eps)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), scale


@torch.library.custom_op("headrace::rms_norm_backward", mutates_args=(), device_types="cpu")
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return batch_invariant.rms_norm_backward(grad.contiguous(), x.contiguous(), weight, scale)


@_rms_norm_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward_triton(grad, x, weight, scale)


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _pull_norm(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    return *torch.ops.headrace.rms_norm_backward(grad, *ctx.saved_tensors), None


_rms_norm.register_autograd(_pull_norm, setup_context=_keep_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32. weight has the shape of x without its first axis."""
    if dispatch.twin(x):
        return batch_invariant.rms_norm(x, weight, eps)
    out: Tensor = torch.ops.headrace.rms_norm(x, weight, eps)[0]
    return out
