"""Rotary embedding on a GPU in one pass: forward, and backward as the rotation by the opposite angle.

Idea: as plain torch operations a rotation is four products, two sums and a concatenation, each of which reads and
writes every query and key. One program here reads all heads of a token once, with the token's angles, and writes them
once.

Layout: x [N, heads, D] contiguous; cos and sin [N, 1, R / 2] in x's dtype; element i is rotated with element i + R / 2,
and elements from R on are copied. Products and sums are float32 and are rounded once. Contraction to fused
multiply-adds is switched off, so that no specialisation of the kernel has other bits. Trade-off: the twin rounds after
each operation, so the bits are not those of a CPU; the fingerprint tells them apart.

Twin: `batch_invariant.rotate_forward`. Error against float64 of the same inputs: one rounding of the result's dtype.
`operators` calls it for tensors on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl

WARPS = 4


@jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, half, rest, BACK: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """One token. half: R / 2; rest: D - R."""
    token = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, BH), tl.arange(0, BD)
    c = tl.load(cos + token * half + lane, mask=lane < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + lane, mask=lane < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    width = 2 * half + rest
    begin = token * heads * width
    at = head[:, None] * width + lane[None, :]
    live = (head < heads)[:, None] & (lane < half)[None, :]
    a = tl.load(x + begin + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + begin + half + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + begin + at, (a * c - b * s).to(out.dtype.element_ty), mask=live)
    tl.store(out + begin + half + at, (b * c + a * s).to(out.dtype.element_ty), mask=live)
    if BR > 1:
        tail = tl.arange(0, BR)
        at = head[:, None] * width + tail[None, :]
        live = (head < heads)[:, None] & (tail < rest)[None, :]
        kept = tl.load(x + begin + 2 * half + at, mask=live, other=0.0)
        tl.store(out + begin + 2 * half + at, kept, mask=live)


def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Twin of `batch_invariant.rotate_forward` for a GPU; back: by the opposite angle, as the gradient wants it."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    tokens, heads, width = x.shape
    half = cos.shape[-1]
    rest = width - 2 * half
    if x.numel():
        _rotate_kernel[(tokens,)](
            x, cos, sin, out, heads, half, rest, BACK=back, BH=dispatch.power_of_two(heads),
            BD=dispatch.power_of_two(half), BR=dispatch.power_of_two(rest) if rest else 1, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
