"""Products with matrices that lie scattered in a pool, gathered in portions that stay in the processor's cache.

Idea: a batched product needs its matrices side by side, so keys and values are copied out of the paged cache first. For
32 sequences of 300 positions of SmolLM2 in float32, the keys of a layer are 8 MB: copied at once, they are written to
memory and read again. A portion of `PORTION_BYTES` is overwritten by the next one before it leaves the cache.

Layout: the pool is [U, ...] with contiguous rows. An entry of `index` names a row; a row holds several matrices (a
block's heads, in exact mode), or several rows make one matrix (a head's blocks, in ordinary mode).

Trade-off: three calls a portion instead of two in all, and one number that suits caches of 1 MiB or more. A product's
members do not influence each other, so the bits are those of one call (`policy.numerics_probe` compares a query alone
and in a batch).
"""

import torch
from torch import Tensor

PORTION_BYTES = 1 << 20


def paged_product(left: Tensor, pool: Tensor, index: Tensor, shape: tuple[int, int], transposed: bool) -> Tensor:
    """left [M, R, K] times M matrices of `shape` (rows, columns) from the pool, `transposed` or not -> [M, R, columns
    or rows]. No gradient.

    index int64 [I] names rows of the pool in the order of the matrices; I is a multiple of M or M a multiple of I.
    """
    members, rows = left.shape[:2]
    entries = len(index)
    units = min(members, entries)
    unit_bytes = members // units * shape[0] * shape[1] * pool.element_size()
    step = max(1, PORTION_BYTES // unit_bytes) if pool.device.type == "cpu" else units
    if step >= units:
        matrices = pool.index_select(0, index).view(members, *shape)
        return torch.bmm(left, matrices.transpose(1, 2) if transposed else matrices)
    out = left.new_empty(members, rows, shape[0] if transposed else shape[1])
    taken, served = step * (entries // units), step * (members // units)
    scratch = pool.new_empty(taken, *pool.shape[1:])
    parts = zip(torch.split(index, taken), torch.split(left, served), torch.split(out, served), strict=True)
    for places, factor, product in parts:
        gathered = scratch[: len(places)]
        torch.index_select(pool, 0, places, out=gathered)
        matrices = gathered.view(-1, *shape)
        torch.bmm(factor, matrices.transpose(1, 2) if transposed else matrices, out=product)
    return out
