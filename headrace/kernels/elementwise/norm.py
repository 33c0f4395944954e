"""Gradient of the root mean square norm on a GPU in one pass, deterministic.

Idea: as plain torch operations in float32 the gradient writes several tensors of twice the size of its input. Here a
program reads rows of the input and of the gradient once, writes the gradient of the input and keeps a sum for that of
the weight. The number of sums is a constant, each adds its rows in ascending order, and torch adds the sums in one
order at the end.

Layout: x and grad [N, heads, D] contiguous (one head for [N, D]), weight [heads, D], scale float32 [N, heads] from the
forward pass. Sums float32 [PARTS, heads, D].
Trade-off: with few rows most sums are zeros.

Twin: `batch_invariant.rms_norm_backward`. Error against float64 autograd: 1e-2 of the gradient's norm in bfloat16, 1e-5
in float32. `operators` calls it for tensors on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

PARTS, CELLS, WARPS = 1024, 1024, 2
"""Sums of the weight's gradient, elements of a step of a program, and its warps."""


@jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, scale, out, sums, tokens, heads, d, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Some tokens of one head: steps of BM tokens, PARTS steps apart."""
    part, head, lane = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    inside = lane < d
    w = tl.load(weight + head * d + lane, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BD,), dtype=tl.float32)
    for first in range(part * BM, tokens, tl.num_programs(0) * BM):
        token = first + tl.arange(0, BM)
        row = token.to(tl.int64) * heads + head
        live = (token < tokens)[:, None] & inside[None, :]
        factor = tl.load(scale + row, mask=token < tokens, other=0.0)
        normed = tl.load(x + row[:, None] * d + lane[None, :], mask=live, other=0.0).to(tl.float32) * factor[:, None]
        g = tl.load(grad + row[:, None] * d + lane[None, :], mask=live, other=0.0).to(tl.float32)
        total += tl.sum(g * normed, 0)
        g = g * w[None, :]
        mean = tl.sum(g * normed, 1) / d
        slope = (g - normed * mean[:, None]) * factor[:, None]
        tl.store(out + row[:, None] * d + lane[None, :], slope.to(out.dtype.element_ty), mask=live)
    tl.store(sums + (part.to(tl.int64) * heads + head) * d + lane, total, mask=inside)


def rms_norm_backward_triton(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `batch_invariant.rms_norm_backward` for a GPU: gradients of x and weight."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    d = x.shape[-1]
    heads = weight.numel() // d
    tokens = x.numel() // max(1, heads * d)
    out = torch.empty_like(x)
    sums = torch.zeros(PARTS, *weight.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        width = dispatch.power_of_two(d)
        _backward_kernel[(PARTS, heads)](
            grad, x, weight, scale.contiguous(), out, sums, tokens, heads, d, BM=max(1, CELLS // width), BD=width,
            num_warps=WARPS,
        )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype)
