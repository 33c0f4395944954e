"""Batch-invariant forward functions: the bits of a row do not depend on the other rows of the batch.

Idea: a sampler decodes one token of 32 sequences, a trainer scores 12,000 tokens at once. Both compute the same sums,
but a BLAS chooses its summation order by the number of rows. Here the order of every reduction is fixed:
 - `linear`: products of the numbers of rows that give a row the same bits on this processor (`heights`);
 - `rms_norm`: a reduction over the last dimension, which torch computes row by row;
 - `swiglu`: x / (1 + exp(-x)) by hand, because torch's silu in float32 treats the last few elements of a buffer
   differently from the others.
`policy.numerics_probe` checks all of them at the start. Attention has its own file, `block_attention`.

Trade-off: a few padded rows and unfused activations; `python -m benchmarks.numerics` measures it. Backward passes need
no fixed order over the batch (one trainer computes them), only determinism, and are written for speed.

The Triton kernels at the end do the same on a GPU: one order of the reduction for every number of rows (`tile`), and no
split of it. `operators` calls them for tensors on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import dispatch, heights, tile
from headrace.kernels.dispatch import Chip, jit, tl
from headrace.kernels.tile import Shape


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return linear_backward(grad, x, weight, ctx.needs_input_grad[1])


def linear_forward(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` in exact mode, without a gradient."""
    rows = x.shape[0]
    pieces = heights.agreeing(heights.linear, x.shape[1], weight.shape[0], x.dtype).pieces(rows)
    extra = sum(pieces) - rows
    x = F.pad(x, (0, 0, 0, extra)) if extra else x
    if len(pieces) == 1:
        out = torch.mm(x, weight.t())
    else:
        out = x.new_empty(len(x), weight.shape[0])
        for part, into in zip(torch.split(x, pieces), torch.split(out, pieces), strict=True):
            torch.mm(part, weight.t(), out=into)
    return out[:rows] if extra else out


def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, where it learns, weight from the gradient of `linear`, in products of all rows."""
    return grad.mm(weight), grad.t().mm(x) if learns else None


def linear(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """x [M, K] @ weight [N, K].T -> [M, N] in their common dtype; F.linear where not exact."""
    if not exact:
        return F.linear(x, weight)
    if torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        return out
    return linear_forward(x, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight from that of `rms_norm`. scale: as forward gave it."""
    normed = x.float() * scale
    grad32 = grad.float()
    g_weight = (grad32 * normed).sum(0).to(weight.dtype)
    g = grad32 * weight.float()
    g_x = (g - normed * (g * normed).mean(-1, keepdim=True)) * scale
    return g_x.to(x.dtype), g_weight


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm`, the factor of each row, float32 [..., 1])."""
    x32 = x.float()
    scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32. weight has the shape of x without its first axis."""
    if torch.is_grad_enabled():
        out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out
    return rms_norm_forward(x, weight, eps)[0]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return swiglu_backward(ctx.saved_tensors[0], grad)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `swiglu` [N, 2I] from that of its result [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    s = torch.sigmoid(gate)
    activated = gate * s
    g_gate, g_up = out.chunk(2, -1)
    torch.mul(grad, activated, out=g_up)
    s.addcmul_(activated, s, value=-1).add_(activated)  # the derivative: s + x s (1 - s)
    torch.mul(s.mul_(up), grad, out=g_gate)
    return out


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """`swiglu` without a gradient."""
    gate, up = gate_up.chunk(2, -1)
    return torch.neg(gate).exp_().add_(1).reciprocal_().mul_(gate).mul_(up)


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2I] -> [N, I]: silu(first half) * second half."""
    if torch.is_grad_enabled():
        out: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
        return out
    return swiglu_forward(gate_up)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_forward(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_forward(grad, cos, -sin), None, None


def rotate_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` without a gradient."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((*parts, rest) if rest.shape[-1] else parts, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first R elements of x [N, heads, D] by cos, sin [N, 1, R / 2].

    Element i is rotated with element i + R / 2; elements from R on stay as they are.
    """
    if torch.is_grad_enabled():
        out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return out
    return rotate_forward(x, cos, sin)


@jit
def _matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of c [m, n] = a [m, k] @ b [n, k].T, all contiguous. Rows and columns beyond the last start again at
    the first: they are loaded without a mask and not stored."""
    down, across = tile.banded(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), BAND)
    rows, cols = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    x = a + (rows % m).to(tl.int64)[:, None] * k
    w = b + (cols % n).to(tl.int64)[None, :] * k
    total = tile.walk(x, w, tl.zeros((BM, BN), dtype=tl.float32), k, BK, EVEN, WIDE)
    place = c + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(place, total.to(c.dtype.element_ty), mask=(rows < m)[:, None] & (cols < n)[None, :])


FEW = Shape(64, 32, 128, 4, 6)
"""For up to 64 rows: the weights are read once, and narrow tiles give each multiprocessor a share of them."""
SOME = Shape(128, 128, 64, 8, 4)
"""Where large tiles would leave multiprocessors without work."""
MANY = Shape(256, 128, 64, 8, 3)
_WIDEST = Shape(64, 64, 32, 4, 2)
"""For float32, which the tensor cores do not multiply."""
_BUSY = 128
"""Fewest tiles that keep a large GPU's multiprocessors busy."""
LARGEST_ROWS = MANY.rows * _BUSY
"""Rows from which every product takes the largest tiles, however few columns it has."""


def _shape(m: int, n: int, dtype: torch.dtype, chip: Chip) -> Shape:
    if dtype == torch.float32:
        return _WIDEST
    if m <= FEW.rows:
        return FEW.on(chip)
    return MANY if dispatch.tiles(m, MANY.rows) * dispatch.tiles(n, MANY.columns) >= _BUSY else SOME


def linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Twin of `linear` for a GPU: x [M, K] @ weight [N, K].T -> [M, N], float32 sums, the same order for every M."""
    x, weight = x.contiguous(), weight.contiguous()
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty(m, n)
    shape = _shape(m, n, x.dtype, dispatch.chip(x.device))
    programs = dispatch.tiles(m, shape.rows) * dispatch.tiles(n, shape.columns)
    if programs:
        _matmul_kernel[(programs,)](
            x, weight, out, m, n, k, BM=shape.rows, BN=shape.columns, BK=shape.depth, BAND=8,
            EVEN=k % shape.depth == 0, WIDE=dispatch.INTERPRETED, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return out


@jit
def _rms_norm_kernel(x, weight, y, scales, d, heads, eps, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row per program; weight [heads, d]: row r has the weight of head r modulo heads."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    value = tl.load(x + row * d + at, mask=at < d, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
    normed = (value * scale).to(y.dtype.element_ty).to(tl.float32)  # rounded twice, like the twin
    scaled = normed * tl.load(weight + (row % heads) * d + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(y + row * d + at, scaled.to(y.dtype.element_ty), mask=at < d)
    tl.store(scales + row, scale)


NORM_WARPS = 2


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `rms_norm_forward` for a GPU: x [N, D] or [N, heads, D], weight without the first axis."""
    x, weight = x.contiguous(), weight.contiguous()
    d = x.shape[-1]
    out, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if out.numel():
        heads, block = weight.numel() // d, dispatch.power_of_two(d)
        _rms_norm_kernel[(x.numel() // d,)](x, weight, out, scales, d, heads, eps, BD=block, num_warps=NORM_WARPS)
    return out, scales
