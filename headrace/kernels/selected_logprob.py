"""Log-probabilities of chosen tokens from hidden states, without a tensor of [tokens, vocabulary].

Idea: a trainer needs one number per token, log p(target), yet the logits of a batch are the largest tensor of the
step (12,800 x 640 here, 12,800 x 151,936 for Qwen3). So tokens are taken in chunks: logits, log-sum-exp, the target's
logit and the entropy are computed, then the logits are freed; backward computes them again. Sampler and trainer call
the same function on logits (`exponentials`), so their numbers can be the same bits.

Layout: chunks of `CHUNK` rows, a multiple of every row padding, so chunks do not change a row's bits. Temperature is a
tensor, because torch may turn a division by a Python number into a multiplication by its reciprocal.
Trade-off: one more product with the head in backward, about a third more work there, for memory that does not grow
with tokens x vocabulary. Entropy is a measurement and carries no gradient.

`selected_logprob_triton` is the forward for a GPU: a program holds some rows, loops over a part of the vocabulary in
ascending tiles and keeps a running maximum, sum, and weighted sum, so logits never leave the chip. Parts have a fixed
number of ids, and a second kernel joins them in ascending order: a row's bits do not depend on the number of rows.
`selected_logprob_backward_triton` takes the vocabulary in slices of `SLICE` ids: one kernel computes the slice's logits
again and their gradients, two matrix products consume these, so memory holds one slice. `operators` calls both for
tensors on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch, tile
from headrace.kernels.batch_invariant import linear
from headrace.kernels.dispatch import jit, tl

CHUNK = 1024
"""Tokens whose logits are held at once."""
SLICE = 8192
"""Ids whose logit gradients backward holds at once: 5 % of a vocabulary of 151,936."""


def scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """logits [M, V] divided by a temperature, float32: one for all rows or one per row [M]; 0 counts as 1."""
    if not isinstance(temperature, Tensor) and temperature in (0, 1):
        return logits.float()  # dividing by 1 changes no bit
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    heat = torch.where(heat == 0, torch.ones_like(heat), heat)
    return logits.float() / (heat[:, None] if heat.ndim else heat)


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled float32 logits [M, V] -> (logits less their row's largest [M, V], exp of these [M, V], its sums [M])."""
    shifted = logits - logits.amax(-1, keepdim=True)
    e = torch.exp(shifted)
    return shifted, e, row_sums(e)


def row_sums(x: Tensor) -> Tensor:
    """Sums of the rows [M, V] -> [M]. torch shares a long sum among its threads where it is the only one: in another
    order."""
    return x.sum(-1) if len(x) != 1 else x.repeat(2, 1).sum(-1)[:1]


def from_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled float32 logits [M, V], targets [M] -> (log-probability, entropy in nats, log-sum-exp), float32 [M]."""
    top = logits.amax(-1)
    shifted, e, total = exponentials(logits)
    log_total = torch.log(total)
    logp = shifted.gather(1, targets[:, None])[:, 0] - log_total
    entropy = log_total - row_sums(e.mul_(shifted)) / total
    return logp, entropy, top + log_total


def _part(temperature: Tensor | float, part: slice) -> Tensor | float:
    """The temperatures of some rows."""
    return temperature[part] if isinstance(temperature, Tensor) and temperature.ndim else temperature


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, exact: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, lse = selected_forward(hidden, weight, targets, temperature, exact)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]  # a frozen head costs no product here
        return *selected_backward(grad, hidden, weight, targets, ctx.temperature, lse, learns), None, None, None


def selected_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor | float, lse: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden and, where it learns, weight from that of the log-probability. lse: as forward gave it."""
    g_hidden = torch.empty_like(hidden)
    g_weight: Tensor | None = None
    slopes = grad
    if isinstance(heat, Tensor) or heat not in (0, 1):
        warm = torch.as_tensor(heat, dtype=torch.float32, device=hidden.device)
        slopes = grad / torch.where(warm == 0, torch.ones_like(warm), warm)
    for at in dispatch.repeated(range(0, len(targets), CHUNK)):
        part = slice(at, at + CHUNK)
        rows = hidden[part]
        slope = scaled(torch.mm(rows, weight.T), _part(heat, part))
        slope = torch.exp(slope.sub_(lse[part, None])).mul_(-slopes[part, None])
        slope.scatter_add_(1, targets[part, None], slopes[part, None])
        slope = slope.to(weight.dtype)
        torch.mm(slope, weight, out=g_hidden[part])
        if learns:
            more = torch.mm(slope.T, rows)
            if g_weight is None:  # a single chunk needs no float32 sum
                g_weight = more if len(targets) <= CHUNK else more.float()
            else:
                g_weight += more
    if learns and g_weight is None:
        g_weight = torch.zeros_like(weight)
    return g_hidden, None if g_weight is None else g_weight.to(weight.dtype)


def selected_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, entropy, log-sum-exp), float32 [M]."""
    logp, entropy, lse = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
    for at in dispatch.repeated(range(0, len(targets), CHUNK)):
        part = slice(at, at + CHUNK)
        logits = scaled(linear(hidden[part], weight, exact), _part(temperature, part))
        logp[part], entropy[part], lse[part] = from_logits(logits, targets[part])
    return logp, entropy, lse


def selected_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, exact: bool
) -> tuple[Tensor, Tensor]:
    """hidden [M, D], weight [V, D], targets [M] int64 -> (log-probability, entropy), float32 [M].

    temperature: a number, or a tensor [M] with one per row; 0 counts as 1. The
    log-probability is differentiable in hidden and weight, the entropy is not.
    """
    if torch.is_grad_enabled():
        logp, entropy = _Selected.apply(hidden, weight, targets, temperature, exact)  # type: ignore[no-untyped-call]
        return logp, entropy
    return selected_forward(hidden, weight, targets, temperature, exact)[:2]


@jit
def _selected_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, targets, heat, scratch, m, v, d,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BM rows, one part of the vocabulary in ascending tiles of BV: the largest logit, the sum of exponentials, their
    sum weighted by the shifted logit, and the target's logit, into scratch [4, parts, m]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    live, near = rows < m, tl.arange(0, BV)
    target = tl.load(targets + rows, mask=live, other=0)
    warm = tl.load(heat + rows, mask=live, other=1.0)
    x = hidden + (rows % m).to(tl.int64)[:, None] * d
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mean = tl.zeros((BM,), dtype=tl.float32)  # sum of e^(x - peak) * (x - peak)
    chosen = tl.zeros((BM,), dtype=tl.float32)
    for first in range(part * PART, tl.minimum(v, part * PART + PART), BV):
        ids = first + near
        w = weight + (ids % v).to(tl.int64)[None, :] * d
        logits = tile.walk(x, w, tl.zeros((BM, BV), dtype=tl.float32), d, BD, EVEN, WIDE)
        logits = tl.where((ids < v)[None, :], logits / warm[:, None], -1.0e30)
        chosen += tl.sum(tl.where(ids[None, :] == target[:, None], logits, 0.0), 1)
        top = tl.maximum(peak, tl.max(logits, 1))
        shifted = logits - top[:, None]
        e = tl.exp(shifted)
        drop = tl.where(peak == float("-inf"), 0.0, peak - top)
        fade = tl.where(peak == float("-inf"), 0.0, tl.exp(drop))
        mean = (mean + drop * total) * fade + tl.sum(e * shifted, 1)
        total = total * fade + tl.sum(e, 1)
        peak = top
    step = tl.num_programs(1).to(tl.int64) * m
    at = scratch + part.to(tl.int64) * m + rows
    tl.store(at, peak, mask=live)
    tl.store(at + step, total, mask=live)
    tl.store(at + 2 * step, mean, mask=live)
    tl.store(at + 3 * step, chosen, mask=live)


@jit
def _join_kernel(scratch, logp, entropy, lse, m, parts, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """BM rows: their parts of the vocabulary in ascending order."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < m
    step = parts * m
    peak = tl.load(scratch + rows, mask=live, other=0.0)
    total = tl.load(scratch + step + rows, mask=live, other=1.0)
    mean = tl.load(scratch + 2 * step + rows, mask=live, other=0.0)
    chosen = tl.load(scratch + 3 * step + rows, mask=live, other=0.0)
    for part in range(1, parts):
        at = scratch + part * m + rows
        next_peak, next_total = tl.load(at, mask=live, other=0.0), tl.load(at + step, mask=live, other=0.0)
        next_mean = tl.load(at + 2 * step, mask=live, other=0.0)
        chosen += tl.load(at + 3 * step, mask=live, other=0.0)
        top = tl.maximum(peak, next_peak)
        drop, next_drop = peak - top, next_peak - top
        fade, next_fade = tl.exp(drop), tl.exp(next_drop)
        mean = (mean + drop * total) * fade + (next_mean + next_drop * next_total) * next_fade
        total = total * fade + next_total * next_fade
        peak = top
    log_total = tl.log(total)
    tl.store(logp + rows, chosen - peak - log_total, mask=live)
    tl.store(entropy + rows, log_total - mean / total, mask=live)
    tl.store(lse + rows, peak + log_total, mask=live)


PART = 2048
"""Ids of a part of the vocabulary: a multiple of `WIDTH`, never a function of the number of rows."""
WIDTH, DEPTH, STAGES = 256, 64, 3
FEW_ROWS, ROWS = 64, 128
"""Rows of a tile: of few tokens, as in a decode step, and of many."""


def _heats(temperature: Tensor | float, rows: int, device: torch.device) -> Tensor:
    """One temperature for each row, float32."""
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=device)
    return torch.where(heat == 0, torch.ones_like(heat), heat).expand(rows).contiguous()


def selected_logprob_triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of the forward for a GPU: (log-probability, entropy, log-sum-exp), float32 [M]; one order for every M."""
    hidden, weight = hidden.contiguous(), weight.contiguous()
    m, (v, d) = len(targets), weight.shape
    heat = _heats(temperature, m, hidden.device)
    out = [torch.empty(m, dtype=torch.float32, device=hidden.device) for _ in range(3)]
    if not m:
        return out[0], out[1], out[2]
    parts = dispatch.tiles(v, PART)
    scratch = torch.empty(4, parts, m, dtype=torch.float32, device=hidden.device)
    full = hidden.dtype == torch.float32
    rows, width, depth = (64, 64, 32) if full else (FEW_ROWS if m <= FEW_ROWS else ROWS, WIDTH, DEPTH)
    _selected_kernel[(dispatch.tiles(m, rows), parts)](
        hidden, weight, targets, heat, scratch, m, v, d, BM=rows, BV=width, BD=depth, PART=PART, EVEN=d % depth == 0,
        WIDE=dispatch.INTERPRETED, num_warps=rows // 16, num_stages=2 if full else STAGES,
    )  # fmt: skip
    _join_kernel[(dispatch.tiles(m, 128),)](scratch, *out, m, parts, BM=128)
    return out[0], out[1], out[2]


@jit
def _slope_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, targets, heat, lse, slopes, out, m, v, d, first, count,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of out [m, count]: the gradients of the logits of ids first .. first + count - 1."""
    down, across = tile.banded(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(count, BV), 8)
    rows, near = down * BM + tl.arange(0, BM), across * BV + tl.arange(0, BV)
    ids = first + near
    live, in_range = rows < m, near < count
    x = hidden + (rows % m).to(tl.int64)[:, None] * d
    w = weight + (ids % v).to(tl.int64)[None, :] * d
    logits = tile.walk(x, w, tl.zeros((BM, BV), dtype=tl.float32), d, BD, EVEN, WIDE)
    warm = tl.load(heat + rows, mask=live, other=1.0)
    slope = tl.load(slopes + rows, mask=live, other=0.0) / warm
    target = tl.load(targets + rows, mask=live, other=-1)
    chance = tl.exp(logits / warm[:, None] - tl.load(lse + rows, mask=live, other=0.0)[:, None])
    value = (tl.where(ids[None, :] == target[:, None], 1.0, 0.0) - chance) * slope[:, None]
    place = out + rows.to(tl.int64)[:, None] * count + near[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=live[:, None] & in_range[None, :])


SLOPE_WIDTH, SLOPE_STAGES = 256, 3


def selected_logprob_backward_triton(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | float, lse: Tensor,
    learns: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Twin of the backward for a GPU: gradients of hidden [M, D] and weight [V, D] from that of logp, float32 [M].

    lse: the log-sum-exp that the forward returned. learns: without it weight's gradient is empty and costs no product.
    Sums run in float32; the same arguments give the same bits.
    """
    hidden, weight, grad = hidden.contiguous(), weight.contiguous(), grad.contiguous()
    (m, d), v = hidden.shape, len(weight)
    heat = _heats(temperature, m, hidden.device)
    g_hidden = torch.zeros(m, d, dtype=torch.float32, device=hidden.device)
    g_weight = torch.empty_like(weight) if learns else weight.new_empty(0)
    full = hidden.dtype == torch.float32
    rows, width, depth = (64, 64, 32) if full else (ROWS, SLOPE_WIDTH, DEPTH)
    for first in range(0, v if m else 0, SLICE):
        count = min(SLICE, v - first)
        slopes = hidden.new_empty(m, count)
        _slope_kernel[(dispatch.tiles(m, rows) * dispatch.tiles(count, width),)](
            hidden, weight, targets, heat, lse, grad, slopes, m, v, d, first, count, BM=rows, BV=width, BD=depth,
            EVEN=d % depth == 0, WIDE=dispatch.INTERPRETED, num_warps=4 if full else 8,
            num_stages=2 if full else SLOPE_STAGES,
        )  # fmt: skip
        part = weight[first : first + count]
        if dispatch.on_gpu(slopes) and not full:
            g_hidden = torch.addmm(g_hidden, slopes, part, out_dtype=torch.float32)
        else:
            g_hidden += torch.mm(slopes, part)
        if learns:
            torch.mm(slopes.T, hidden, out=g_weight[first : first + count])
    return g_hidden.to(hidden.dtype), g_weight if m else g_weight.zero_()
