"""Rotary positions and the two ways to attend: over packed sequences, and over a cache.

Both call the block loop of `kernels.block_attention` in exact mode, and torch's fused attention otherwise. The
ordinary way is kept complete: it is what the exact way is compared with, in speed and in bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import block_attention
from headrace.kernels.block_attention import BLOCK, Bucket, Packing
from headrace.policy.cache import KVCache, Step
from headrace.policy.rope import RopeScaling, frequencies

_CHUNK = 1024


class Rotary:
    """cos and sin tables [positions, D / 2], grown in chunks of one shape so that growing never changes an entry."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None) -> None:
        self._frequencies, self._factor = frequencies(head_dim, theta, scaling)
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, head_dim // 2, dtype=dtype)

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """positions int64 [N], all below `longest` -> cos, sin [N, 1, D / 2]."""
        while len(self._cos) < longest:
            # The table is shared by sampling, scoring and training: it must not become an inference-only tensor.
            with torch.inference_mode(False), torch.no_grad():
                at = torch.arange(len(self._cos), len(self._cos) + _CHUNK).float()
                angle = at[:, None] * self._frequencies
                cos, sin = angle.cos(), angle.sin()
                if self._factor != 1.0:
                    cos, sin = cos * self._factor, sin * self._factor
                self._cos = torch.cat((self._cos, cos.to(self._dtype)))
                self._sin = torch.cat((self._sin, sin.to(self._dtype)))
        if self._cos.device != positions.device:
            self._cos, self._sin = self._cos.to(positions.device), self._sin.to(positions.device)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, exact: bool) -> Tensor:
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D] -> [N, H, D]."""
    if exact:
        return block_attention.packed_attention(q, k, v, packing, scale)
    out = torch.zeros_like(q)
    for bucket in packing.buckets:
        length = bucket.keys

        def spread(x: Tensor, bucket: Bucket = bucket) -> Tensor:
            flat = x.new_zeros(bucket.sequences * bucket.keys, *x.shape[1:])
            flat = flat.index_copy(0, bucket.key_places, x.index_select(0, bucket.rows))
            return flat.view(bucket.sequences, bucket.keys, *x.shape[1:]).transpose(1, 2)

        part = F.scaled_dot_product_attention(
            spread(q), spread(k), spread(v), is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        flat = part.transpose(1, 2).reshape(bucket.sequences * length, *q.shape[1:])
        out = out.index_copy(0, bucket.rows, flat.index_select(0, bucket.key_places))
    return out


def cached(
    q: Tensor, k: Tensor, v: Tensor, step: Step, cache: KVCache, layer: int, scale: float, pad: int, exact: bool
) -> Tensor:
    """Write the new keys and values into the cache, then attend over it. Shapes as in `packed`."""
    keys, values = cache.keys[layer], cache.values[layer]
    dim = q.shape[-1]
    keys.view(-1, dim).index_copy_(0, step.places, k.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, step.places, v.reshape(-1, dim))
    query = step.spread(q)
    if exact:
        if step.pages is None:
            step.pages = block_attention.paging(step.table, step.grid, q.shape[1] // k.shape[1], pad)
        return step.gather(block_attention.cached_attention(query, keys, values, step.pages, scale))
    batch, blocks = step.table.shape

    def context(pool: Tensor) -> Tensor:
        chosen = pool.index_select(0, step.table.view(-1))
        return chosen.view(batch, blocks, -1, BLOCK, dim).transpose(1, 2).flatten(2, 3)

    seen = torch.arange(blocks * BLOCK, device=q.device) <= step.grid[:, None, :, None]
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        context(keys),
        context(values),
        attn_mask=seen,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return step.gather(out.transpose(1, 2))
