"""MXFP8: numbers in blocks of 32 that share a power of two (OCP Microscaling Formats, v1.0), and their quantisers.

Idea: an element is e4m3 (8 bits, largest 448), a block's scale e8m0 (a bare exponent). The scale is RCEIL: the smallest
power of two under which the block's largest element still fits, 2^ceil(log2(amax / 448)). The OCP text's FLOOR rule
lets the largest element clip and costs a third more error (4.1 to 5.5e-2 against 3.6 to 3.8e-2 of a product's norm).

The casts of `expert_format = "mxfp8"` (experts alone; all else stays in the policy's dtype):

    master weights            float32, never rounded                  training/state.py
    expert weights            master -> e4m3, 1x32 along reduction    after each update; these bytes are published
    router, attention, head   master -> the policy's dtype            as without MXFP8
    expert inputs             activations -> e4m3, 1x32               before gate_up, and again before down
    products                  operands widened, float32 sums          the policy's dtype out
    gradients                 the policy's dtype, straight through    dgrad with the quantised weights,
                                                                      wgrad with the quantised activations
    optimizer                 float32 on the masters

Layout: blocks are along the last dimension. An element times its scale is exact in bfloat16 and float32, so operands
are widened and then multiplied as ordinary numbers. Each row is quantised by itself, so exact mode stays exact.
Trade-off: on a CPU this shows the effect on accuracy and saves no time. Hopper has no block-scaled product either:
there only bytes are saved.

Error: scales are exact; elements are within 2^-4 of their size (round to nearest even), or 2^-10 of the block's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

BLOCK = 32
LARGEST = 448.0


def exponents(amax: Tensor) -> Tensor:
    """RCEIL: amax float32 -> biased exponents int32, 1 to 247; 255 (NaN) where amax is not finite."""
    bits = (amax / LARGEST).view(torch.int32)
    raised = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return torch.where(amax.isfinite(), raised.clamp(min=1), torch.full_like(raised, 255))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], K a multiple of 32 -> (float8_e4m3fn [..., K], scales uint8 [..., K / 32]). ValueError otherwise."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"expected a multiple of {BLOCK} elements along the reduction for mxfp8, got {x.shape[-1]}")
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    scale = exponents(blocks.abs().amax(-1))
    inverse = torch.where(scale == 255, 0x7FC00000, (254 - scale) << 23).view(torch.float32)
    q = (blocks * inverse[..., None]).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.to(torch.uint8)


def dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantise` kept, exactly. q [..., K], scale [..., K / 32] -> [..., K]."""
    exponent = scale.to(torch.int32)
    factor = torch.where(exponent == 255, 0x7FC00000, exponent << 23).view(torch.float32)
    return (q.float().reshape(*q.shape[:-1], q.shape[-1] // BLOCK, BLOCK) * factor[..., None]).flatten(-2).to(dtype)


@jit
def _round_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 within +-448 -> e4m3 bits, to nearest even, in integers because the interpreter's cast loses the
    carry."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 2^14 leaves just those bits, rounded to nearest even by the addition itself.
    near = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, near, normal) | sign).to(tl.uint8)


@jit
def _rounded(x, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 within +-448 -> e4m3 bits, to nearest even: the GPU's own conversion, except in the interpreter."""
    if EMULATED:
        out = _round_e4m3(x)
    else:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return out


@jit
def number(raw, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 -> float32: the GPU's own conversion, except in the interpreter, which has no e4m3."""
    if EMULATED:
        byte = raw.to(tl.uint8, bitcast=True).to(tl.int32)
        size, mantissa = (byte >> 3) & 15, byte & 7
        normal = (((size + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
        out = tl.where(size == 0, mantissa.to(tl.float32) * 0.001953125, normal)
        out = tl.where((byte & 128) != 0, -out, out)
    else:
        out = raw.to(tl.float32)
    return out


@jit
def _scale_of(amax):  # type: ignore[no-untyped-def]
    """RCEIL exponents int32, as `exponents`; amax is finite."""
    bits = (amax / 448.0).to(tl.int32, bitcast=True)
    raised = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.maximum(raised, 1)


@jit
def _quantise_kernel(  # type: ignore[no-untyped-def]
    x, q, s, m, k, BM: tl.constexpr, BK: tl.constexpr, EMULATED: tl.constexpr
):  # fmt: skip
    """One tile [BM, BK] of x [m, k], k a multiple of 32: blocks never cross a tile."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BK + tl.arange(0, BK)
    live = (row < m)[:, None] & (col < k)[None, :]
    place = row[:, None] * k + col[None, :]
    value = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    blocks = tl.reshape(value, (BM, BK // 32, 32))
    e = _scale_of(tl.max(tl.abs(blocks), 2))
    inverse = ((254 - e) << 23).to(tl.float32, bitcast=True)
    out = tl.reshape(_rounded(blocks * inverse[:, :, None], EMULATED), (BM, BK))
    tl.store(q + place, out, mask=live)
    at = tl.program_id(1) * (BK // 32) + tl.arange(0, BK // 32)
    inside = (row < m)[:, None] & (at < k // 32)[None, :]
    tl.store(s + row[:, None] * (k // 32) + at[None, :], e.to(tl.uint8), mask=inside)


ROW_TILE = (2, 2048, 4)
"""Rows and columns of a tile, and warps of a program."""


def quantise_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `quantise` for a GPU, two dimensions, finite numbers; the same bytes."""
    m, k = x.shape
    if k % BLOCK:
        raise ValueError(f"expected a multiple of {BLOCK} elements along the reduction for mxfp8, got {k}")
    q = torch.empty(m, k, dtype=torch.uint8, device=x.device)
    s = torch.empty(m, k // BLOCK, dtype=torch.uint8, device=x.device)
    high, wide, warps = ROW_TILE
    if x.numel():
        grid = (dispatch.tiles(m, high), dispatch.tiles(k, wide))
        _quantise_kernel[grid](
            x.contiguous(), q, s, m, k, BM=high, BK=wide, EMULATED=dispatch.INTERPRETED, num_warps=warps
        )
    return q.view(torch.float8_e4m3fn), s


@jit
def _dequantise_kernel(q, s, out, count, BLOCK: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    e = tl.load(s + at // 32, mask=live, other=127).to(tl.int32)
    factor = tl.where(e == 255, 0x7FC00000, e << 23).to(tl.float32, bitcast=True)
    value = number(tl.load(q + at, mask=live, other=0.0), EMULATED) * factor
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


def dequantise_triton(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Twin of `dequantise` for a GPU: one pass, no copy in float32."""
    # The interpreter has no e4m3 and reads its bytes.
    q = q.contiguous().view(torch.uint8 if dispatch.INTERPRETED else torch.float8_e4m3fn)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if out.numel():
        _dequantise_kernel[(dispatch.tiles(out.numel(), 2048),)](
            q, scale.contiguous(), out, out.numel(), BLOCK=2048, EMULATED=dispatch.INTERPRETED, num_warps=4
        )
    return out
