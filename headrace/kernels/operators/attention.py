"""Causal attention in exact mode: over packed sequences, and of new tokens over a paged cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels import block_attention, dispatch
from headrace.kernels.attention.backward import packed_attention_backward_triton
from headrace.kernels.attention.forward import packed_attention_triton, ragged_attention_triton
from headrace.kernels.block_attention import Bucket, Packing, Paging


def _packed_lse(saved: Sequence[Tensor], packing: Packing, like: Tensor, heads: int) -> Tensor:
    """The log-sum-exp of each bucket, with padding -> float32 [N, H]."""
    out = like.new_empty(*like.shape[:2], 1, dtype=torch.float32)
    for bucket, lse in zip(packing.buckets, saved, strict=True):
        block_attention.gather(lse[..., None], bucket, heads, bucket.queries, bucket.query_places, out)
    return out[..., 0]


def _bucket_lse(lse: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """The log-sum-exp in the layout of a bucket. Padding is 0, because its factors are 0 as well."""
    return block_attention.spread(lse[..., None], bucket, heads, bucket.queries, bucket.query_places)[..., 0]


@torch.library.custom_op("headrace::packed_attention", mutates_args=(), device_types="cpu")
def _packed(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    packing = Packing(lengths, q.device)
    out, saved = block_attention.packed_forward(q, k, v, packing, scale)
    return out, _packed_lse(saved, packing, q, k.shape[1]).contiguous()


@_packed.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    return packed_attention_triton(q, k, v, lengths, scale)


@_packed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


@torch.library.custom_op("headrace::packed_attention_backward", mutates_args=(), device_types="cpu")
def _packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    packing = Packing(lengths, q.device)
    saved = [_bucket_lse(lse, bucket, k.shape[1]) for bucket in packing.buckets]
    return block_attention.packed_backward(grad, q, k, v, out, saved, packing, scale)


@_packed_backward.register_kernel("cuda")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return packed_attention_backward_triton(grad, q, k, v, out, lse, lengths, scale)


@_packed_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.lengths, ctx.scale = inputs[3:]


def _pull(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pulled = torch.ops.headrace.packed_attention_backward(grad, *ctx.saved_tensors, ctx.lengths, ctx.scale)
    return *pulled, None, None


_packed.register_autograd(_pull, setup_context=_keep)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each packed sequence: q [N, H, D], k and v [N, V, D] -> [N, H, D]. Differentiable."""
    if dispatch.twin(q):
        return block_attention.packed_attention(q, k, v, packing, scale)
    out: Tensor = torch.ops.headrace.packed_attention(q, k, v, packing.lengths, scale)[0]
    return out


@torch.library.custom_op("headrace::cached_attention", mutates_args=(), device_types="cpu")
def _cached(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float
) -> Tensor:
    return block_attention.ragged_attention(q, keys, values, table, lengths, starts, scale)


@_cached.register_kernel("cuda")
def _(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float
) -> Tensor:
    return ragged_attention_triton(q, keys, values, table, lengths, starts, scale)


@_cached.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float
) -> Tensor:
    return torch.empty_like(q)


class CachedStep(Protocol):
    """The new tokens of a cached forward: `policy.cache.Step`. The first layer computes the places, and all layers use
    them."""

    table: Tensor
    grid: Tensor
    lengths: list[int]
    starts: list[int]
    pages: Paging | None

    def spread(self, x: Tensor) -> Tensor:
        """Packed [N, H, D] -> [B, T, H, D]."""

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, step: CachedStep, scale: float) -> Tensor:
    """New tokens q [N, H, D] over a paged cache [blocks, V, 64, D] that holds theirs -> [N, H, D]. No gradient.

    For each query the bits of `packed_attention`.
    """
    if not dispatch.twin(q):
        attend = torch.ops.headrace.cached_attention
        out: Tensor = attend(q, keys, values, step.table, step.lengths, step.starts, scale)
        return out
    if step.pages is None:
        step.pages = block_attention.paging(step.table, step.grid, q.shape[1] // keys.shape[1], q)
    return step.gather(block_attention.cached_attention(step.spread(q), keys, values, step.pages, scale))
