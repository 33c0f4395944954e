"""SwiGLU on a GPU in one pass, forward and backward.

Idea: as plain torch operations the activation reads and writes its operands six times forward and seven times backward.
Here a program reads a part of a row's gates and ups once and writes the result, or both gradients, once.

Layout: gate_up [N, 2I] contiguous, gates in the first half of a row -> [N, I]. Arithmetic is float32, rounded once.
Trade-off: the twin rounds after each operation, so the bits are not those of a CPU; the fingerprint tells them apart.

Twins: `batch_invariant.swiglu_forward` and `swiglu_backward`. Error against float64 of the same inputs: one rounding of
the result's dtype. `operators` calls them for tensors on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

WIDEST, WARPS = 4096, 8
"""Largest number of elements of a program, and its warps."""


@jit
def _forward_kernel(gate_up, out, width, BW: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of one row."""
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BW + tl.arange(0, BW)
    live = lane < width
    gate = tl.load(gate_up + row * 2 * width + lane, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + lane, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + lane, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=live)


@jit
def _backward_kernel(gate_up, grad, out, width, BW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients of a part of one row."""
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BW + tl.arange(0, BW)
    live = lane < width
    gate = tl.load(gate_up + row * 2 * width + lane, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + lane, mask=live, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + lane, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    slope = s + gate * s * (1.0 - s)
    tl.store(out + row * 2 * width + lane, (g * up * slope).to(out.dtype.element_ty), mask=live)
    tl.store(out + row * 2 * width + width + lane, (g * gate * s).to(out.dtype.element_ty), mask=live)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(WIDEST, dispatch.power_of_two(width))
    return (rows, dispatch.tiles(width, block)), block


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """Twin of `batch_invariant.swiglu_forward` for a GPU: [N, 2I] -> [N, I]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        grid, block = _grid(rows, width)
        _forward_kernel[grid](gate_up, out, width, BW=block, num_warps=WARPS, enable_fp_fusion=False)
    return out


def swiglu_backward_triton(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Twin of `batch_invariant.swiglu_backward` for a GPU: the gradient [N, 2I] from that of the result [N, I]."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    out = torch.empty_like(gate_up)
    if grad.numel():
        grid, block = _grid(*grad.shape)
        _backward_kernel[grid](gate_up, grad, out, grad.shape[1], BW=block, num_warps=WARPS)
    return out
