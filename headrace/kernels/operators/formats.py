"""Number formats: blocks of 32 in MXFP8, and the differences between two versions of a tensor."""

import torch
from torch import Tensor

from headrace.kernels import delta, dispatch, mxfp8


@torch.library.custom_op("headrace::quantise", mutates_args=(), device_types="cpu")
def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    return mxfp8.quantise(x)


@_quantise.register_kernel("cuda")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = mxfp8.quantise_triton(x.reshape(-1, x.shape[-1]))
    return q.view(x.shape), scale.view(*x.shape[:-1], -1)


@_quantise.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // mxfp8.BLOCK, dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], K a multiple of 32 -> (float8_e4m3fn [..., K], scales uint8 [..., K / 32]). No gradient."""
    if dispatch.twin(x):
        return mxfp8.quantise(x)
    q, scale = torch.ops.headrace.quantise(x)
    return q, scale


def rounded(x: Tensor) -> Tensor:
    """x [..., K] quantised and widened again, in its own dtype. Idempotent."""
    return mxfp8.dequantise(*quantise(x), x.dtype)


@torch.library.custom_op("headrace::changes", mutates_args=(), device_types="cpu")
def _changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return delta.changes(old, new)


@_changes.register_kernel("cuda")
def _(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return delta.changes_triton(old, new)


@_changes.register_fake
def _(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return old.new_empty(count, dtype=torch.int64), old.new_empty(count, dtype=torch.int32)


@torch.library.custom_op("headrace::apply_changes", mutates_args=(), device_types="cpu")
def _apply(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return delta.apply(base, at, folded)


@_apply.register_kernel("cuda")
def _(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return delta.apply_triton(base, at, folded)


@_apply.register_fake
def _(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return torch.empty_like(base)
