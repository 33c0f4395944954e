"""Number formats of experts, and the differences between two versions of a tensor.

A format, `grid`, is PolicyConfig.expert_format: "mxfp8", "nvfp4" or, for the policy's dtype, "". In the model,
quantised weights are numbers of the policy's dtype on the format's grid.
"""

from functools import partial

import torch
from torch import Tensor

from headrace.kernels import delta, dispatch, expert_mlp, mxfp8
from headrace.kernels.block_scaled import nvfp4
from headrace.kernels.grouped_mm import Mx, Nv


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


@torch.library.custom_op("headrace::quantise_nvfp4", mutates_args=(), device_types="cpu")
def _quantise_nvfp4(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    return nvfp4.quantise(x, outer)


@_quantise_nvfp4.register_kernel("cuda")
def _(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = nvfp4.quantise_triton(x.reshape(-1, x.shape[-1]), outer.reshape(-1))
    return q.view(*x.shape[:-1], -1), scale.view(*x.shape[:-1], -1)


@_quantise_nvfp4.register_fake
def _(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    head, wide = x.shape[:-1], x.shape[-1]
    scales = x.new_empty(*head, wide // nvfp4.BLOCK, dtype=torch.float8_e4m3fn)
    return x.new_empty(*head, wide // 2, dtype=torch.uint8), scales


def quantise_nvfp4(x: Tensor, outer: Tensor) -> Nv:
    """x [..., K], K a multiple of 16, under its tensors' scales, float32 [...]; see `nvfp4`. No gradient."""
    if dispatch.twin(x):
        return Nv(*nvfp4.quantise(x, outer), outer)
    q, scale = torch.ops.headrace.quantise_nvfp4(x, outer)
    return Nv(q, scale, outer)


@torch.library.custom_op("headrace::dequantise", mutates_args=(), device_types="cpu")
def _dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # q as bytes: opcheck compares operands, and torch compares no e4m3.
    return mxfp8.dequantise(q.view(torch.float8_e4m3fn), scale, dtype)


@_dequantise.register_kernel("cuda")
def _(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return mxfp8.dequantise_triton(q, scale, dtype)


@_dequantise.register_fake
def _(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def widened(x: Mx | Nv, dtype: torch.dtype) -> Tensor:
    """A quantised operand as numbers, exactly [..., K]. No gradient."""
    if isinstance(x, Nv):
        return nvfp4.dequantise(*x, dtype)
    if dispatch.twin(x.q):
        return mxfp8.dequantise(x.q, x.scale, dtype)
    out: Tensor = torch.ops.headrace.dequantise(x.q.view(torch.uint8), x.scale, dtype)
    return out


def activations(x: Tensor, grid: str) -> Mx | Nv:
    """Inputs of a product [..., K], quantised row by row."""
    return quantise_nvfp4(x, nvfp4.outer_of_rows(x)) if grid == "nvfp4" else Mx(*quantise(x))


def weights(w: Tensor, grid: str, tensors: int = 1) -> Mx | Nv:
    """Matrices [..., N, K], quantised. tensors: published tensors that each matrix has, one below the other."""
    if grid != "nvfp4":
        return Mx(*quantise(w))
    *head, rows, wide = w.shape
    outer = nvfp4.outer_of_matrices(w.reshape(*head, tensors, rows // tensors, wide)).flatten(-2)
    return quantise_nvfp4(w, outer)


def rounded(x: Tensor, grid: str = "mxfp8") -> Tensor:
    """Inputs of a product [..., K], quantised row by row and widened again, in their own dtype. Idempotent. In MXFP8
    weights are rounded in the same way."""
    return widened(activations(x, grid), x.dtype)


def rounded_weights(w: Tensor, grid: str, tensors: int = 1) -> Tensor:
    """`weights`, widened again, in their own dtype. Idempotent."""
    return widened(weights(w, grid, tensors), w.dtype)


def cast(grid: str) -> expert_mlp.Cast:
    """The rounding of the experts' inputs."""
    return partial(rounded, grid=grid) if grid else expert_mlp.as_is


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


def changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """old, new: flat integers of one dtype of `delta.WIDTHS` -> positions int64 [k], ascending, and zig-zag differences
    int32 [k] from old to new. The host waits for k. On a GPU it needs up to six bytes of scratch per element."""
    if dispatch.twin(old):
        return delta.changes(old, new)
    at, folded = torch.ops.headrace.changes(old, new)
    return at, folded


@torch.library.custom_op("headrace::apply_changes", mutates_args=(), device_types="cpu")
def _apply(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return delta.apply(base, at, folded)


@_apply.register_kernel("cuda")
def _(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return delta.apply_triton(base, at, folded)


@_apply.register_fake
def _(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    return torch.empty_like(base)


def apply_changes(base: Tensor, at: Tensor, folded: Tensor) -> Tensor:
    """A copy of `base`, flat integers, with the differences of `changes` added at their positions."""
    if dispatch.twin(base):
        return delta.apply(base, at, folded)
    out: Tensor = torch.ops.headrace.apply_changes(base, at, folded)
    return out
