"""Rotary positions and the two ways to attend: over packed sequences, and over a cache.

Both call the block loop of `kernels.block_attention` in exact mode. Ordinary mode takes `varlen_attn` for packed
sequences in bfloat16 on CUDA (`kernels.library` has the conditions), and exact mode's kernel over a cache on CUDA,
because plain products there write every score to memory. Elsewhere it uses the method that is fastest on a CPU: two
matrix products and a softmax over a cache and for short training sequences, otherwise torch's fused attention over
sequences that are padded to whole blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import dispatch, operators
from headrace.kernels.block_attention import BLOCK, Bucket, Packing
from headrace.policy.cache import Context, KVCache, Step
from headrace.policy.grouped_attention import grouped_attention, mask_of, paged_grouped_attention
from headrace.policy.rope import RopeScaling, frequencies

_CHUNK = 1024
_SHORT = 256
"""Keys up to which plain products beat the fused attention, forward and backward in bfloat16 (8 x 208 tokens of
SmolLM2: 114 against 137 ms a layer on a CPU without bfloat16 instructions)."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of packed tokens -> what the heads read."""


class TokenSharing(Protocol):
    """Processes that compute a micro-batch together, each a run of its packed tokens: `training.parallel.context`."""

    @property
    def rank(self) -> int:
        """The number of this process among them."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def around(self, attend: Attend, counts: Sequence[int]) -> Attend:
        """Attention over the tokens of all processes, for queries, keys and values of this one's; counts: tokens of
        each process."""

    def joined(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The values [n] of all processes, in the order of tokens; counts: n of each. Differentiable."""


class Rotary:
    """cos and sin tables [positions, D / 2], grown in chunks of one shape so that growing never changes an entry."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None) -> None:
        self._frequencies, self._factor = frequencies(head_dim, theta, scaling)
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
                self._cos = torch.cat((self._cos, cos.to(self._cos)))  # computed on the CPU, whatever the device
                self._sin = torch.cat((self._sin, sin.to(self._sin)))
        if self._cos.device != positions.device:
            with torch.inference_mode(False), torch.no_grad():
                self._cos, self._sin = self._cos.to(positions.device), self._sin.to(positions.device)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, exact: bool) -> Tensor:
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D] -> [N, H, D]."""
    if exact:
        return operators.packed_attention(q, k, v, packing, scale)
    if not operators.varlen_refusal(q, v):
        return operators.varlen_attention(q, k, v, packing, scale)
    heads = k.shape[1]
    parts = []
    for bucket in packing.buckets:
        short = not dispatch.on_gpu(q) and q.dtype == torch.bfloat16 and bucket.keys <= _SHORT
        attend = _short if short and torch.is_grad_enabled() else _fused
        part = attend(q, k, v, bucket, scale)
        part = part.view(bucket.sequences, heads, bucket.keys, -1, q.shape[2])
        parts.append(part.transpose(1, 2).flatten(0, 1).flatten(1, 2))
    if not parts:
        return torch.zeros_like(q)
    out: Tensor = _Packed.apply(packing, *parts)  # type: ignore[no-untyped-call]
    return out


class _Aligned(torch.autograd.Function):
    """Packed [N, heads, D] -> [B, S, heads, D]. For backward it keeps no tensor; `index_copy` would keep its source."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bucket: Bucket) -> Tensor:
        ctx.bucket, ctx.tokens = bucket, len(x)
        flat = x.new_zeros(bucket.sequences * bucket.keys, *x.shape[1:])
        flat.index_copy_(0, bucket.key_places, x.index_select(0, bucket.rows))
        return flat.view(bucket.sequences, bucket.keys, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.flatten(0, 1).index_select(0, ctx.bucket.key_places)
        return grad.new_zeros(ctx.tokens, *grad.shape[2:]).index_copy_(0, ctx.bucket.rows, rows), None


class _Packed(torch.autograd.Function):
    """The inverse for all buckets of a packing, [B * S, heads, D] each -> [N, heads, D]; it keeps no tensor either."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, *parts: Tensor) -> Tensor:
        ctx.packing = packing
        out = parts[0].new_empty(packing.tokens, *parts[0].shape[1:])
        for bucket, part in zip(packing.buckets, parts, strict=True):
            out.index_copy_(0, bucket.rows, part.index_select(0, bucket.key_places))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = []
        for bucket in ctx.packing.buckets:
            flat = grad.new_zeros(bucket.sequences * bucket.keys, *grad.shape[1:])
            out.append(flat.index_copy_(0, bucket.key_places, grad.index_select(0, bucket.rows)))
        return None, *out


def _aligned(x: Tensor, bucket: Bucket) -> Tensor:
    """Packed [N, heads, D] -> [B, S, heads, D], zeros where a sequence is shorter than its bucket."""
    out: Tensor = _Aligned.apply(x, bucket)  # type: ignore[no-untyped-call]
    return out


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * G, D] -> [B * heads, T * G, D]."""
    batch, steps, _, dim = x.shape
    return x.view(batch, steps, heads, -1, dim).transpose(1, 2).reshape(batch * heads, -1, dim)


def _short(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """Two products and a softmax -> [B * V, S * G, D]: faster than the fused call forward and backward in bfloat16."""
    heads = k.shape[1]
    qs, ks, vs = (_grouped(_aligned(x, bucket), heads) for x in (q, k, v))
    at = torch.arange(bucket.keys, device=q.device)
    mask = mask_of(at[None, None, :] > at[:, None], q.shape[1] // heads, q.dtype)
    return grouped_attention(qs, ks, vs, mask, scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """torch's fused attention -> [B * V, S * G, D]."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    qs, ks, vs = (_aligned(x, bucket).transpose(1, 2) for x in (q, k, v))
    part = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=scale, enable_gqa=group > 1)
    return _grouped(part.transpose(1, 2), heads)


def cached(
    q: Tensor, k: Tensor, v: Tensor, step: Step, cache: KVCache, layer: int, scale: float, exact: bool
) -> Tensor:
    """Write the new keys and values into the cache, then attend over it. Shapes as in `packed`."""
    keys, values = cache.keys[layer], cache.values[layer]
    heads, dim = k.shape[1:]
    keys.view(-1, dim).index_copy_(0, step.places, k.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, step.places, v.reshape(-1, dim))
    if exact or dispatch.on_gpu(q):
        return operators.cached_attention(q, keys, values, step, scale)
    query = step.spread(q)
    group = q.shape[1] // heads
    if step.context is None:
        step.context = context(step, heads, group, q.dtype)
    pool_k, pool_v = (x.view(-1, BLOCK, dim) for x in (keys, values))
    out = paged_grouped_attention(_grouped(query, heads), pool_k, pool_v, step.context.rows, step.context.mask, scale)
    return step.gather(out.view(step.batch, heads, step.steps, group, dim).transpose(1, 2).flatten(2, 3))


def context(step: Step, heads: int, group: int, dtype: torch.dtype) -> Context:
    """The rows of the pool that hold the keys of a cached forward, by head, and the mask of each query."""
    blocks = step.table.shape[1]
    rows = step.table[:, None, :] * heads + torch.arange(heads, device=step.table.device)[:, None]
    at = torch.arange(min(step.starts) + 1, blocks * BLOCK, device=step.table.device)  # all queries see the keys before
    return Context(rows.view(-1), mask_of(at > step.grid[:, :, None], group, dtype))
