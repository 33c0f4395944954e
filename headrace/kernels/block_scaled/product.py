"""Products of many experts over block-scaled operands, for Blackwell's tensor cores. Not run on a GPU.

Idea: `tl.dot_scaled` gives the bytes and the block scales of MXFP8 or NVFP4 to one instruction (tcgen05 with block
scales), so nothing is widened. The rows of an expert are contiguous, as in `grouped_mm`; the reduction in ascending
tiles, no split. NVFP4's float32 scales are powers of two per row and multiply the sums at the end, exactly.

    forward  y[t] = x[t] @ w[e].T         x [T, K], w [E, N, K] -> [T, N]; both in the same format

Other GPUs have no such instruction: for sm_90, Triton 3.7.1 compiles MXFP8 to a bfloat16 product of 253 registers and
NVFP4 not at all. They multiply numbers that were widened before (`grouped_mm`). Exact mode does so everywhere, because
few and many rows must have one arithmetic.

Trade-off: the model holds widened numbers, so weights are quantised again before each product (exactly: quantising is
idempotent). That reads every expert's weights, therefore only products of many rows are computed here. Scales are
loaded by pointers, not in the tensor cores' own layout.

Error against float64 of the widened operands: as `grouped_mm`, if the instruction adds in float32. The interpreter
widens instead and so checks indexing and masking alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch, grouped_mm, mxfp8
from headrace.kernels.dispatch import jit, tl
from headrace.kernels.grouped_mm import Ends, Mx, Nv
from headrace.kernels.tile import Shape

TILES = Shape(128, 128, 128, 8, 3)
"""Not timed; 128 is the fewest rows that the instruction takes."""
BLACKWELL = 10
"""Major compute capability of B200 and GB200; that of RTX cards, 12, has another instruction."""


def used(rows: int, experts: int, exact: bool, device: torch.device) -> bool:
    """Whether a product of quantised operands is computed here."""
    return not exact and rows >= grouped_mm.MANY_ROWS * experts and there(device)


def there(device: torch.device) -> bool:
    """Whether the device has the instruction."""
    cuda = device.type == "cuda" and torch.cuda.is_available()
    return cuda and torch.cuda.get_device_capability(device)[0] == BLACKWELL


@jit
def _part(x, rows, first, width, C: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] of x [., width], from column `first` on; zeros beyond the last column."""
    cols = first + tl.arange(0, C)
    at = x + rows.to(tl.int64)[:, None] * width + cols[None, :]
    if EVEN:
        out = tl.load(at)
    else:
        out = tl.load(at, mask=(cols < width)[None, :], other=0.0)  # no integer becomes an e4m3
    return out


@jit
def _numbers(raw, scale, FOUR: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [R, K]: the numbers of bytes and block scales, for the interpreter."""
    R: tl.constexpr = raw.shape[0]
    G: tl.constexpr = scale.shape[1]
    if FOUR:
        byte = raw.to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (R, G * 16))
        size, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
        element = tl.where(size == 0, half, (1.0 + half) * ((size + 126) << 23).to(tl.float32, bitcast=True))
        element = tl.where((code & 8) != 0, -element, element)
        factor = mxfp8.number(scale, True)
    else:
        element = mxfp8.number(raw, True)
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    V: tl.constexpr = 16 if FOUR else 32
    return tl.reshape(tl.reshape(element, (R, G, V)) * factor[:, :, None], (R, G * V))


@jit
def _scaled_kernel(  # type: ignore[no-untyped-def]
    x, xs, xo, w, ws, wo, out, tiles, n, k, FOUR: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert; tiles int32 [., 3]: expert, first row, end row. xo [T] and wo [E * N] where FOUR.

    Rows and columns beyond the last are others, loaded and not stored.
    """
    PACK: tl.constexpr = 2 if FOUR else 1
    V: tl.constexpr = 16 if FOUR else 32
    FORMAT: tl.constexpr = "e2m1" if FOUR else "e4m3"
    down = tl.program_id(0)
    expert, first, end = tl.load(tiles + down * 3), tl.load(tiles + down * 3 + 1), tl.load(tiles + down * 3 + 2)
    if first >= end:
        return
    rows, cols = first + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    near, lines = tl.minimum(rows, end - 1), expert * n + tl.minimum(cols, n - 1)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        a = _part(x, near, start // PACK, k // PACK, BK // PACK, EVEN)
        b = _part(w, lines, start // PACK, k // PACK, BK // PACK, EVEN)
        sa = _part(xs, near, start // V, k // V, BK // V, EVEN)
        sb = _part(ws, lines, start // V, k // V, BK // V, EVEN)
        if EMULATED:
            total = tl.dot(_numbers(a, sa, FOUR), tl.trans(_numbers(b, sb, FOUR)), total, input_precision="ieee")
        else:
            total = tl.dot_scaled(a, sa, FORMAT, tl.trans(b), sb, FORMAT, total)
    if FOUR:
        total = total * tl.load(xo + near)[:, None] * tl.load(wo + lines)[None, :]
    place = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (cols < n)[None, :])


def _bytes(operand: Mx | Nv, scales: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes, block scales, scales of rows) as the kernel reads them; the interpreter reads eight bits as whole
    numbers."""
    outer = operand.outer.contiguous() if isinstance(operand, Nv) else operand.scale
    kind = torch.uint8 if isinstance(operand, Nv) else torch.float8_e4m3fn
    if dispatch.INTERPRETED:
        kind = scales = torch.uint8
    return operand.q.contiguous().view(kind), operand.scale.contiguous().view(scales), outer


def scaled_mm_triton(x: Mx | Nv, w: Mx | Nv, ends: Ends, dtype: torch.dtype = torch.float32) -> Tensor:
    """Twin of `grouped_mm.grouped_mm` over quantised operands, for a GPU that `used` accepts."""
    four = isinstance(w, Nv)
    scales = torch.float8_e4m3fn if four else torch.uint8
    (q, s, o), (v, t, p) = _bytes(x, scales), _bytes(w, scales)
    n, k = v.shape[1], v.shape[2] * (2 if four else 1)
    tiles = grouped_mm.tiles_of(ends, len(q), TILES.rows, q.device)
    out = torch.empty(len(q), n, dtype=dtype, device=q.device)
    if len(q):
        _scaled_kernel[(len(tiles), dispatch.tiles(n, TILES.columns))](
            q, s, o, v, t, p, out, tiles, n, k, FOUR=four, EVEN=k % TILES.depth == 0, EMULATED=dispatch.INTERPRETED,
            BM=TILES.rows, BN=TILES.columns, BK=TILES.depth, num_warps=TILES.warps, num_stages=TILES.stages,
        )  # fmt: skip
    return out
