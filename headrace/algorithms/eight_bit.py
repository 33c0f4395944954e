"""Block-wise dynamic quantisation to eight bits, for AdamW's moments (Dettmers et al., arXiv 2110.02861).

The idea: a block of 256 neighbours is divided by its largest magnitude, and each quotient becomes the index of the
nearest of 256 levels. The levels are dense near 1 and span seven decades (the paper's dynamic map). A code is one byte,
and a block adds a float32 scale: 2.03 bytes per parameter for both moments, instead of 8.

Layout: blocks lie along the last dimension and never cross it; its last block is shorter. A shard of FSDP is whole rows
of the first dimension, so blocks, and with them the bits, do not depend on the number of processes. Parameters with one
dimension (norms, biases) have rows of one element and keep float32. Codes have the parameter's shape, scales
[..., ceil(last / 256)].

The second moment has no level 0: with one, an element that is small in its block would divide the first moment by
AdamW's epsilon alone (Li et al., arXiv 2309.01507, call it the zero-point problem). Its lowest level is 1e-7.

Libraries that were considered: torchao's AdamW8bit works with shards on a CPU (0.18, FSDP2 over gloo), but it compiles
its update in every process with a C++ compiler (the first step took 63 s, 13 s with the compiler's cache), and decides
by a shard's number of elements what it quantises and where blocks begin; bitsandbytes cuts blocks across rows. So a
checkpoint of theirs resumes with the same number of processes alone, and both have the level 0.

Trade-off: the lower decades have few levels, so an element much smaller than its block's largest is known to a factor
of two at worst, and changes below half the distance of two levels are lost.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
DECADES = 7


class Levels(NamedTuple):
    """The numbers that codes stand for, on one device."""

    values: Tensor
    """float32 [256], ascending."""
    borders: Tensor
    """float32 [255], halfway between neighbours; a number on a border belongs to the lower level."""

    @classmethod
    def on(cls, device: torch.device, *, signed: bool) -> "Levels":
        """signed: from -1 to 1, for the first moment; otherwise from 1e-7 to 1, for the second."""
        values, borders = _levels(signed)
        return cls(
            torch.tensor(values, dtype=torch.float32, device=device),
            torch.tensor(borders, dtype=torch.float32, device=device),
        )


@functools.cache
def _levels(signed: bool) -> tuple[list[float], list[float]]:
    """Levels and borders. Each decade has twice as many levels as the one below, at equal distances: the middles of
    2^i (signed) or 2^(i + 1) parts of 0.1 to 1 times its power of ten; then 1 itself, and -1 in the place of the
    smallest negative one: without it, which the paper's map has not, a largest element below 0 would shrink with every
    update."""
    values = [1.0, 0.0, -1.0] if signed else [1.0, 1e-7]
    for decade in range(DECADES):
        parts = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade + 1 - DECADES) for part in range(parts)]
        values += middles + ([-value for value in middles] if signed and decade else [])
    values.sort()
    return values, [(low + high) / 2.0 for low, high in itertools.pairwise(values)]


def applies(parameter: Tensor) -> bool:
    """Whether the moments of a parameter are quantised: it has rows."""
    return parameter.dim() > 1


def scales_of(x: Tensor) -> Tensor:
    """float32 zeros, one for each block of x [..., n]."""
    return x.new_zeros((*x.shape[:-1], -(-x.shape[-1] // BLOCK)), dtype=torch.float32)


def quantise(x: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """x float32 [R, n] -> codes uint8 [R, n], scales float32 [R, ceil(n / 256)]."""
    scales, quotients = scales_of(x), torch.empty_like(x)
    for (part, scale), (quotient, _) in zip(_blocks(x, scales), _blocks(quotients, scales), strict=True):
        scale.copy_(torch.linalg.vector_norm(part, math.inf, dim=-1, keepdim=True))
        quotient.copy_(part / torch.where(scale > 0.0, scale, 1.0))
    return torch.bucketize(quotients, levels.borders, out_int32=True).to(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor, levels: Levels) -> Tensor:
    """The float32 [R, n] that codes and scales stand for."""
    values = levels.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    for part, scale in _blocks(values, scales):
        part.mul_(scale)
    return values


def _blocks(x: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of x [R, n] as blocks [R, B, 256] and of their scales as [R, B, 1]; then those of each row's shorter
    block."""
    full = x.shape[-1] // BLOCK
    if full:
        yield x[:, : full * BLOCK].view(len(x), full, BLOCK), scales[:, :full, None]
    if x.shape[-1] % BLOCK:
        yield x[:, None, full * BLOCK :], scales[:, full:, None]
