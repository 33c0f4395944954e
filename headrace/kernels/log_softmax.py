"""Log-probabilities of whole rows: one program per row, the vocabulary in ascending tiles, for every batch size.

Idea: libraries choose how many threads share a row by the number of rows, so another batch size sums the same row in
another order. Here a row has one program and one order: a first loop keeps a running maximum and sum (Milakov and
Gimelshein, arXiv 1805.02867), a second writes x - logsumexp. The row stays in the cache for the second loop: results,
which nothing reads again here, are the first to leave it. Backward: one loop sums the gradient, one writes.

Layout: x [M, V] of any float dtype -> float32 [M, V]; tiles of `TILE` ids.
Trade-off: x is read twice, and a batch of few rows uses little of a GPU. Where only chosen tokens are needed,
`selected_logprob` never holds the logits.

Error against float64 of the same inputs: 1e-5 absolute where a row's logits span less than 100; results are float32.
Nothing in the model calls the Triton side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.dispatch import jit, tl

TILE, WARPS = 8192, 32
"""Ids of a tile, and warps of a program."""


def log_softmax(x: Tensor) -> Tensor:
    """x [M, V] -> float32 [M, V]: log-probabilities. Reductions over the last dimension, row by row."""
    shifted = x.float() - x.float().amax(-1, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def log_softmax_backward(grad: Tensor, logp: Tensor) -> Tensor:
    """Gradient of x, float32 [M, V], from that of `log_softmax` and its result."""
    return grad - torch.exp(logp) * grad.sum(-1, keepdim=True)


@jit
def _forward_kernel(x, logp, v, BV: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row a program."""
    row, near = tl.program_id(0).to(tl.int64) * v, tl.arange(0, BV)
    # Each lane keeps its own sum, and the lanes are added once at the end: a tile needs no reduction across threads.
    peak = tl.full((BV,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BV,), dtype=tl.float32)
    for start in range(0, v, BV):
        at = start + near
        value = tl.load(x + row + at, mask=at < v, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        top = tl.maximum(peak, value)
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(peak - safe) + tl.exp(value - safe)
        peak = top
    top = tl.max(peak, 0)
    total = tl.sum(total * tl.exp(peak - top), 0)
    lse = top + tl.log(total)
    for start in range(0, v, BV):
        at = start + near
        value = tl.load(x + row + at, mask=at < v, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(logp + row + at, value - lse, mask=at < v, eviction_policy="evict_first")


@jit
def _backward_kernel(grad, logp, out, v, BV: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row a program: the gradient's sum, then the result."""
    row, near = tl.program_id(0).to(tl.int64) * v, tl.arange(0, BV)
    sums = tl.zeros((BV,), dtype=tl.float32)
    for start in range(0, v, BV):
        at = start + near
        sums += tl.load(grad + row + at, mask=at < v, other=0.0)
    total = tl.sum(sums, 0)
    for start in range(0, v, BV):
        at = start + near
        slope = tl.load(grad + row + at, mask=at < v, other=0.0)
        chance = tl.exp(tl.load(logp + row + at, mask=at < v, other=0.0))
        tl.store(out + row + at, slope - chance * total, mask=at < v)


def log_softmax_triton(x: Tensor) -> Tensor:
    """Twin of `log_softmax` for a GPU: x [M, V] of any float dtype -> float32 [M, V]."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        _forward_kernel[(len(x),)](x, out, x.shape[1], BV=TILE, num_warps=WARPS)
    return out


def log_softmax_backward_triton(grad: Tensor, logp: Tensor) -> Tensor:
    """Twin of `log_softmax_backward` for a GPU: float32 [M, V], both contiguous."""
    grad, logp = grad.float().contiguous(), logp.contiguous()
    out = torch.empty_like(logp)
    if logp.numel():
        _backward_kernel[(len(logp),)](grad, logp, out, logp.shape[1], BV=TILE, num_warps=WARPS)
    return out
