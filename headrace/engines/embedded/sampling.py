"""Draws tokens so that a repetition gives the same ids in any batch.

Idea: each draw has its own uniform number, a hash of the request's seed and of the token's absolute position. No
generator is shared, so a draw does not depend on earlier ones. The token comes from the inverse distribution function:
cumulative weights in float64, ascending by id, the first that reaches uniform x total. Every operation works per row.

A GPU adds in an order that depends on the number of rows. There the weights are whole numbers, in units of 2^-40 of the
largest, whose sums have no order (`drawn`). An id a trillion times less likely than the likeliest is never drawn.
"""

import torch
from torch import Tensor

from headrace.kernels.selected_logprob import exponentials, scaled

_MASK = (1 << 64) - 1
_NUMBERS = 1 << 18
"""Logits that are drawn from at once: few enough for a cache, and for memory that the allocator keeps."""
_MANY_NUMBERS = 1 << 24
"""The same on a GPU: its temporary tensors take half a GiB."""
_UNITS = float(1 << 40)
"""The largest weight as a whole number: the sum over 2^22 ids fits in 63 bits."""


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number inside (0, 1) that depends on seed and position alone."""
    word = _mix((_mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return ((word >> 11) + 0.5) / (1 << 53)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V], temperatures float32 [M] (0 is greedy), uniforms float64 [M] -> (ids int64 [M], their
    log-probabilities float32 [M] under that temperature; greedy ones under 1)."""
    rows = max(1, _NUMBERS // logits.shape[1])
    columns = (torch.split(x, rows) for x in (logits, temperatures, uniforms))
    parts = [_draw(*part) for part in zip(*columns, strict=True)]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    warm = scaled(logits, temperatures)
    shifted, weights, total = exponentials(warm)
    sums = weights.cumsum(-1, dtype=torch.float64)
    # A row that is not finite may find no place: any id does, because its log-probability is not finite either.
    ids = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None])[:, 0].clamp_(max=logits.shape[1] - 1)
    greedy = temperatures == 0
    if bool(greedy.any()):
        ids = torch.where(greedy, warm.argmax(-1), ids)
    return ids, shifted.gather(1, ids[:, None])[:, 0] - torch.log(total)


def drawn(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """As `draw` on any device, with no wait for it, and without log-probabilities: ids int64 [M]."""
    rows = max(1, _MANY_NUMBERS // logits.shape[1])
    columns = (torch.split(x, rows) for x in (logits, temperatures, uniforms))
    parts = [_drawn(*part) for part in zip(*columns, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _drawn(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    warm = scaled(logits, temperatures)
    weights = torch.exp(warm - warm.amax(-1, keepdim=True)).double().mul_(_UNITS).long()
    sums = weights.cumsum(-1)
    wanted = (uniforms * sums[:, -1]).ceil().long().clamp_(min=1)
    wanted = torch.minimum(wanted, sums[:, -1])
    ids = torch.searchsorted(sums, wanted[:, None])[:, 0].clamp_(max=logits.shape[1] - 1)
    return torch.where(temperatures == 0, warm.argmax(-1), ids)
