"""NVFP4, experimental: four-bit numbers in blocks of 16 that share an eight-bit scale, and their quantiser.

Idea: an element is e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign), a block's scale e4m3, and a tensor has a float32
scale: number = element * block scale * tensor scale. That is NVIDIA's format ("Introducing NVFP4 for Efficient and
Accurate Low-Precision Inference", 2025; "Pretraining Large Language Models with NVFP4", arXiv 2509.25149). Three
choices within it:

    tensor scale    a power of two, the smallest under which the largest block scale rounds to at most 448: every number
                    is then one of bfloat16 and of float32, so exact mode stays exact and operands can be widened first
    block scale     to nearest even, but at least 2^-6: the largest element of every larger block becomes 6, so a second
                    quantisation gives the same bytes. No weight on the grid is at the border of another scale, so a
                    small update changes few bytes; scales that are rounded up would all be there
    activations     each row is a tensor, with a float32 scale of its own: a row's bits do not depend on other rows

The casts of `expert_format = "nvfp4"` are those of the table in `mxfp8` with this format in place of e4m3 in blocks of
32. Gradients pass straight through and are computed in the policy's dtype. The paper's Hadamard transforms, stochastic
rounding and weights in squares of 16 x 16 serve gradients in four bits and are not here.

Layout: two elements a byte, the first in the low half; q uint8 [..., K / 2], scales float8_e4m3fn [..., K / 16], outer
(the tensor's scale) float32 [...], one per row: the rows of one tensor have the same.
Trade-off: on a CPU this shows the effect on accuracy and saves no time. A power of two as tensor scale leaves a factor
of 2 of the range of block scales unused at worst; blocks 2^14 below the largest lose bits. A tensor is read twice: its
largest size first.

Error: an element is within a fifth of its size, or within a quarter of block scale times tensor scale. Scales,
midpoints and their products are exact in float32, and no float is divided: a GPU's division may be approximate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

BLOCK = 16
_MIDPOINTS = ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5), (5.0,))
"""Numbers between two elements: the first of a pair goes down to an even code, the second up to one."""


def outer_scale(amax: Tensor) -> Tensor:
    """amax float32, of a tensor -> its scale: the smallest power of two, from 2^-100 on, that times 6 * 464 is at least
    amax, because 464 rounds to 448; NaN where amax is not finite."""
    exponent = ((amax.view(torch.int32) + 0x51FFFF) >> 23) - 11
    return torch.where(amax.isfinite(), (exponent.clamp(min=27) << 23).view(torch.float32), torch.nan)


def outer_of_rows(x: Tensor) -> Tensor:
    """x [..., K] -> the scale of each row, float32 [...]."""
    return outer_scale(x.abs().amax(-1).float())


def outer_of_matrices(x: Tensor) -> Tensor:
    """x [..., N, K] -> the scale of each matrix, once for each of its rows, float32 [..., N]."""
    return outer_scale(x.abs().amax((-2, -1)).float())[..., None].expand(x.shape[:-1])


def block_scales(amax: Tensor, outer: Tensor) -> Tensor:
    """amax float32 of each block -> bytes of e4m3, int32: a sixth of amax over the tensor's scale, to nearest even, at
    least 2^-6; 127 (NaN) where amax is not finite."""
    inverse = ((254 - (outer.view(torch.int32) >> 23)) << 23).view(torch.float32)
    bits = (amax * inverse).view(torch.int32)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    low = mantissa < 0xC00000  # then a sixth of it is below 2^21, and an eighth of its power of two 2^17, else 2^18
    unit = torch.where(low, 786432, 1572864)
    eighths = mantissa // unit
    rest = 2 * (mantissa - eighths * unit)
    eighths += (rest + (eighths & 1) > unit).to(torch.int32)
    exponent = (bits >> 23) - 122 - low.to(torch.int32)
    byte = ((exponent << 3) + eighths - 8).clamp(8, 126)
    return torch.where(amax.isfinite() & outer.isfinite(), byte, torch.full_like(byte, 127))


def quantise(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], K a multiple of 16, outer float32 [...] -> (uint8 [..., K / 2], float8_e4m3fn [..., K / 16]).
    ValueError otherwise."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"expected a multiple of {BLOCK} elements along the reduction for nvfp4, got {x.shape[-1]}")
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    size = blocks.abs()
    scale = block_scales(size.amax(-1), outer[..., None]).to(torch.uint8).view(torch.float8_e4m3fn)
    step = (scale.float() * outer[..., None])[..., None]
    code = torch.signbit(blocks).to(torch.uint8) << 3
    for pair in _MIDPOINTS:
        code += size > pair[0] * step
        if len(pair) == 2:
            code += size >= pair[1] * step
    halves = code.flatten(-2)
    return halves[..., 0::2] | (halves[..., 1::2] << 4), scale


def dequantise(q: Tensor, scale: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantise` kept, exactly. q [..., K / 2], scale [..., K / 16], outer [...] -> [..., K]."""
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their opposites; a list of numbers would make the host wait for the device.
    code = torch.arange(16, device=q.device)
    size, half = (code >> 1) & 3, (code & 1) * 0.5
    positive = torch.where(size == 0, half, (1 + half) * (1 << size) * 0.5)
    table = torch.where(code < 8, positive, -positive)
    elements = table[torch.stack((q & 15, q >> 4), -1).flatten(-2).int()]
    step = scale.view(torch.float8_e4m3fn).float() * outer[..., None]
    return (elements.reshape(*scale.shape, BLOCK) * step[..., None]).flatten(-2).to(dtype)


@jit
def _quantise_kernel(  # type: ignore[no-untyped-def]
    x, outer, q, s, m, k, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """One tile [BM, BK] of x [m, k], a block never crosses a tile; outer [m]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BK + tl.arange(0, BK)
    live = (row < m)[:, None] & (col < k)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * k + col[None, :], mask=live, other=0.0).to(tl.float32)
    whole = tl.load(outer + row, mask=row < m, other=1.0)
    inverse = ((254 - (whole.to(tl.int32, bitcast=True) >> 23)) << 23).to(tl.float32, bitcast=True)
    blocks = tl.reshape(value, (BM, BK // 16, 16))
    size = tl.abs(blocks)
    bits = (tl.max(size, 2) * inverse[:, None]).to(tl.int32, bitcast=True)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    low = mantissa < 0xC00000
    unit = tl.where(low, 786432, 1572864)
    eighths = mantissa // unit
    rest = 2 * (mantissa - eighths * unit)
    eighths += (rest + (eighths & 1) > unit).to(tl.int32)
    byte = (((bits >> 23) - 122 - low.to(tl.int32)) << 3) + eighths - 8
    byte = tl.minimum(tl.maximum(byte, 8), 126)
    number = ((byte + (120 << 3)) << 20).to(tl.float32, bitcast=True)  # e4m3 without its denormal numbers
    step = (number * whole[:, None])[:, :, None]
    code = (blocks.to(tl.int32, bitcast=True) >> 28) & 8
    code += (size > 0.25 * step).to(tl.int32) + (size >= 0.75 * step).to(tl.int32)
    code += (size > 1.25 * step).to(tl.int32) + (size >= 1.75 * step).to(tl.int32)
    code += (size > 2.5 * step).to(tl.int32) + (size >= 3.5 * step).to(tl.int32)
    code += (size > 5.0 * step).to(tl.int32)
    first, second = tl.split(tl.reshape(code, (BM, BK // 2, 2)))
    at = tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2)
    inside = (row < m)[:, None] & (at < k // 2)[None, :]
    tl.store(q + row.to(tl.int64)[:, None] * (k // 2) + at[None, :], (first | (second << 4)).to(tl.uint8), mask=inside)
    at = tl.program_id(1) * (BK // 16) + tl.arange(0, BK // 16)
    inside = (row < m)[:, None] & (at < k // 16)[None, :]
    tl.store(s + row.to(tl.int64)[:, None] * (k // 16) + at[None, :], byte.to(tl.uint8), mask=inside)


ROW_TILE = (2, 2048, 4)
"""Rows and columns of a tile, and warps of a program."""


def quantise_triton(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `quantise` for a GPU, x [M, K], outer [M], finite numbers; the same bytes."""
    m, k = x.shape
    if k % BLOCK:
        raise ValueError(f"expected a multiple of {BLOCK} elements along the reduction for nvfp4, got {k}")
    q = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    s = torch.empty(m, k // BLOCK, dtype=torch.uint8, device=x.device)
    high, wide, warps = ROW_TILE
    if x.numel():
        grid = (dispatch.tiles(m, high), dispatch.tiles(k, wide))
        _quantise_kernel[grid](x.contiguous(), outer.contiguous(), q, s, m, k, BM=high, BK=wide, num_warps=warps)
    return q, s.view(torch.float8_e4m3fn)
