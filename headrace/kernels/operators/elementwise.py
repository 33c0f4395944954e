"""The operations between the products: rotary embedding and SwiGLU."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import batch_invariant, dispatch
from headrace.kernels.elementwise.rotary import rotate_triton
from headrace.kernels.elementwise.swiglu import swiglu_backward_triton, swiglu_triton


@torch.library.custom_op("headrace::rotate", mutates_args=(), device_types="cpu")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return batch_invariant.rotate_forward(x, cos, -sin if back else sin).contiguous()


@_rotate.register_kernel("cuda")
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return rotate_triton(x, cos, sin, back)


@_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_angles(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _pull_rotate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.headrace.rotate(grad, *ctx.saved_tensors, not ctx.back), None, None, None


_rotate.register_autograd(_pull_rotate, setup_context=_keep_angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first R elements of x [N, heads, D] by cos, sin [N, 1, R / 2].

    Element i is rotated with element i + R / 2; elements from R on stay as they are.
    """
    if dispatch.twin(x):
        return batch_invariant.rotate(x, cos, sin)
    out: Tensor = torch.ops.headrace.rotate(x, cos, sin, False)
    return out


@torch.library.custom_op("headrace::swiglu", mutates_args=(), device_types="cpu")
def _swiglu(gate_up: Tensor) -> Tensor:
    return batch_invariant.swiglu_forward(gate_up)


@_swiglu.register_kernel("cuda")
def _(gate_up: Tensor) -> Tensor:
    return swiglu_triton(gate_up)


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("headrace::swiglu_backward", mutates_args=(), device_types="cpu")
def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    return batch_invariant.swiglu_backward(gate_up, grad)


@_swiglu_backward.register_kernel("cuda")
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    return swiglu_backward_triton(gate_up, grad)


@_swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _pull_swiglu(ctx: Any, grad: Tensor) -> Tensor:
    pulled: Tensor = torch.ops.headrace.swiglu_backward(ctx.saved_tensors[0], grad)
    return pulled


_swiglu.register_autograd(_pull_swiglu, setup_context=_keep_rows)


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2I] -> [N, I]: silu(first half) * second half."""
    if dispatch.twin(gate_up):
        return batch_invariant.swiglu(gate_up)
    out: Tensor = torch.ops.headrace.swiglu(gate_up)
    return out
