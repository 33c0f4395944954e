"""Attention over KV blocks of 64 in ascending order: the same bits for a decode step and for a whole sequence.

Idea: a query's result is a sum over keys, and a fused kernel chooses the order of the sum by the length of its input.
Here the order is fixed by position alone: blocks of exactly 64 keys, ascending, online softmax in float32. A fully
masked block changes no bit (factor 1, summand 0), so sequences may be padded with blocks. Queries are rows of a
product, which may be padded, batched or sliced.

Layout: `packed_attention` takes concatenated sequences, groups them into buckets by their number of blocks, and loops
over each bucket's blocks with the queries that can see them. `cached_attention` takes new tokens over a paged cache;
for a single new token all blocks go into one product, and only the sums run in order.

Trade-off: a loop of small products instead of one fused call. The backward pass needs determinism and not this order:
it recomputes the scores from the saved log-sum-exp (FlashAttention-2, arXiv 2307.08691). Dimensions: N tokens, B
sequences, T queries of a sequence, H query heads, V key-value heads, G = H / V, D head_dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import dispatch, heights
from headrace.kernels.attention.paged_product import paged_product

BLOCK = 64
"""Positions in a KV block: the unit of attention, of the KV cache and of prefix reuse."""
_STRIDE = 32
"""Queries of a bucket are padded to a multiple of this."""


class Bucket(NamedTuple):
    """Sequences with the same number of KV blocks."""

    sequences: int
    queries: int
    """Positions per sequence on the query side."""
    keys: int
    """Positions per sequence on the key side: whole blocks."""
    rows: Tensor
    """int64 [n]: the bucket's tokens in the packed order."""
    query_places: Tensor
    """int64 [n]: the indices of those tokens in [sequences * queries]."""
    key_places: Tensor
    """int64 [n]: the indices of those tokens in [sequences * keys]."""


class Packing:
    """Maps the tokens of concatenated sequences to buckets of sequences with the same number of KV blocks.

    At most 63 positions of a sequence are padding, for any mixture of lengths. One is made per forward pass and shared
    by its layers.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None) -> None:
        """Lengths in tokens; zero is allowed."""
        self.lengths = list(lengths)
        size = torch.tensor(lengths, dtype=torch.int64)
        first = size.cumsum(0) - size
        self.tokens = int(size.sum())
        self.longest = max(self.lengths, default=0)
        self.borders = F.pad(size[size > 0].cumsum(0), (1, 0)).to(device, torch.int32)
        """int32 [B + 1]: the tokens before each sequence that has tokens, and all of them."""
        starts = first.repeat_interleave(size)
        self.positions = (torch.arange(self.tokens) - starts).to(device)
        """[N] position of each token in its sequence."""
        self.buckets: list[Bucket] = []
        blocks = (size + BLOCK - 1) // BLOCK
        for count in sorted({int(n) for n in blocks if n > 0}):
            members = (blocks == count).nonzero()[:, 0]
            sizes = size[members]
            offset = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
            rows = first[members].repeat_interleave(sizes) + offset
            longest = -(-int(sizes.max()) // _STRIDE) * _STRIDE
            lane = torch.arange(len(members)).repeat_interleave(sizes)
            queries, keys = lane * longest + offset, lane * (count * BLOCK) + offset
            self.buckets.append(
                Bucket(len(members), longest, count * BLOCK, rows.to(device), queries.to(device), keys.to(device))
            )


def spread(x: Tensor, bucket: Bucket, heads: int, length: int, places: Tensor) -> Tensor:
    """Packed x [N, heads * g, D] -> [B * heads, length * g, D]: rows ordered by token, zeros where there is no
    token."""
    dim = x.shape[-1]
    group = x.shape[1] // heads
    out = x.new_zeros(bucket.sequences * length, *x.shape[1:])
    out.index_copy_(0, places, x.index_select(0, bucket.rows))
    out = out.view(bucket.sequences, length, heads, group, dim).transpose(1, 2)
    return out.reshape(bucket.sequences * heads, length * group, dim)


def gather(x: Tensor, bucket: Bucket, heads: int, length: int, places: Tensor, into: Tensor) -> None:
    """The inverse of `spread`: writes x [B * heads, length * g, D] to the bucket's rows of `into` [N, heads * g, D]."""
    dim = x.shape[-1]
    group = x.shape[1] // length
    flat = x.view(bucket.sequences, heads, length, group, dim).transpose(1, 2).reshape(-1, heads * group, dim)
    into.index_copy_(0, bucket.rows, flat.index_select(0, places))


def _future(group: int, device: torch.device) -> Tensor:
    """[64 * G, 64]: True where a key of the diagonal block lies after the query."""
    at = torch.arange(BLOCK, device=device)
    return (at[None, :] > at[:, None]).repeat_interleave(group, 0)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, group: int) -> tuple[Tensor, Tensor]:
    """q [B, T * G, D], k and v [B, S, D], S >= T whole blocks -> (out float32 [B, T * G, D], logsumexp [B, T * G])."""
    batch, rows, dim = q.shape
    future = _future(group, q.device)
    out = q.new_zeros(batch, rows, dim, dtype=torch.float32)
    total = q.new_zeros(batch, rows, dtype=torch.float32)
    peak = torch.full_like(total, -torch.inf)
    for start in dispatch.repeated(range(0, k.shape[1], BLOCK)):
        at = start * group  # queries before this block see none of its keys
        s = heights.batched(heights.scores, q[:, at:], k[:, start : start + BLOCK]).float().mul_(scale)
        s[:, : BLOCK * group].masked_fill_(future[: rows - at], -torch.inf)
        top = torch.maximum(peak[:, at:], s.amax(-1))
        p = s.sub_(top[..., None]).exp_()
        fade = torch.exp(peak[:, at:] - top)
        total[:, at:].mul_(fade).add_(p.sum(-1))
        more = heights.batched(heights.shares, p.to(v.dtype), v[:, start : start + BLOCK])
        out[:, at:].mul_(fade[..., None]).add_(more)
        peak[:, at:] = top
        del s, p, more  # the scores of two blocks at once would double the temporary memory
    return out.div_(total[..., None]), peak + torch.log(total)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        out, saved = packed_forward(q, k, v, packing, scale)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, *saved = ctx.saved_tensors
        return *packed_backward(grad, q, k, v, out, saved, ctx.packing, ctx.scale), None, None


def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Sequence[Tensor], packing: Packing, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of `packed_attention`. saved: what forward gave, bucket by bucket."""
    heads = k.shape[1]
    group = q.shape[1] // heads
    future = _future(group, q.device)
    g_q, g_k, g_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    for bucket, lse in zip(packing.buckets, saved, strict=True):
        qs, gs, ds = (spread(x, bucket, heads, bucket.queries, bucket.query_places) for x in (q, grad, delta))
        ks, vs = (spread(x, bucket, heads, bucket.keys, bucket.key_places) for x in (k, v))
        b_q = torch.zeros_like(qs, dtype=torch.float32)
        b_k, b_v = torch.empty_like(ks), torch.empty_like(vs)
        for start in dispatch.repeated(range(0, ks.shape[1], BLOCK)):
            at = start * group
            kj, vj = ks[:, start : start + BLOCK], vs[:, start : start + BLOCK]
            s = torch.bmm(qs[:, at:], kj.transpose(1, 2)).float().mul_(scale)
            p = s.sub_(lse[:, at:, None]).exp_()
            p[:, : BLOCK * group].masked_fill_(future[: p.shape[1]], 0.0)
            b_v[:, start : start + BLOCK] = torch.bmm(p.to(v.dtype).transpose(1, 2), gs[:, at:])
            dp = torch.bmm(gs[:, at:], vj.transpose(1, 2)).float()
            dp = dp.sub_(ds[:, at:]).mul_(p).mul_(scale).to(q.dtype)
            b_q[:, at:].add_(torch.bmm(dp, kj))
            b_k[:, start : start + BLOCK] = torch.bmm(dp.transpose(1, 2), qs[:, at:])
            del s, p, dp  # as in `_causal`
        gather(b_q.to(q.dtype), bucket, heads, bucket.queries, bucket.query_places, g_q)
        gather(b_k, bucket, heads, bucket.keys, bucket.key_places, g_k)
        gather(b_v, bucket, heads, bucket.keys, bucket.key_places, g_v)
    return g_q, g_k, g_v


def packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, list[Tensor]]:
    """(`packed_attention`, log-sum-exp float32 [B * V, T * G] of each bucket, padding included)."""
    heads = k.shape[1]
    result, saved = torch.empty_like(q), []
    for bucket in packing.buckets:
        qs = spread(q, bucket, heads, bucket.queries, bucket.query_places)
        ks, vs = (spread(x, bucket, heads, bucket.keys, bucket.key_places) for x in (k, v))
        out, lse = _causal(qs, ks, vs, scale, q.shape[1] // heads)
        gather(out.to(q.dtype), bucket, heads, bucket.queries, bucket.query_places, result)
        saved.append(lse)
    return result, saved


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each packed sequence: q [N, H, D], k and v [N, V, D] -> [N, H, D]. Differentiable."""
    if torch.is_grad_enabled():
        out: Tensor = _PackedAttention.apply(q, k, v, packing, scale)  # type: ignore[no-untyped-call]
        return out
    return packed_forward(q, k, v, packing, scale)[0]


class Paging(NamedTuple):
    """The blocks that the new tokens of a step attend to: B sequences with up to T new tokens each.

    One is made per step and shared by the layers.
    """

    table: Tensor
    """int64 [B * n]: block numbers, n for each sequence."""
    blocks: int
    """n: blocks of each sequence."""
    limit: Tensor
    """int64 [B, 1, 1, rows, 1]: the last position that a query sees; rows are T * G, padded."""
    lowest: int
    """The smallest limit: blocks that end there or before need no mask."""
    hidden: Tensor | None
    """bool [B, n, 1, rows, 64]: the keys that lie after a query. Only where T is 1; otherwise each block gets a mask of
    its own."""
    parts: list[tuple[int, int]]
    """For more than one new token, per block: the first row that sees one of its keys in any sequence (rounded down to
    `_STRIDE`), and the first row from which all queries see all of its keys."""


def paging(table: Tensor, positions: Tensor, group: int, like: Tensor | None) -> Paging:
    """The paging of a step. table int64 [B, n]: block numbers, any valid one where a sequence has fewer blocks.

    positions int64 [B, T]: positions of the queries. Rows T * G are padded to a height of exact products by blocks, for
    queries `like` [..., D]; None pads none.
    """
    limit = positions if group == 1 else positions.repeat_interleave(group, 1)
    rows, one = limit.shape[1], positions.shape[1] == 1
    extra = 0 if like is None else _height(rows, one, like) - rows
    lowest = int(limit.min())
    blocks = table.shape[1]
    parts = [] if one else _parts(limit, blocks)
    limit = (F.pad(limit, (0, extra), value=lowest) if extra else limit)[:, None, None, :, None]
    hidden = _after(limit, 0, blocks) if one else None
    return Paging(table.view(-1), blocks, limit, lowest, hidden, parts)


def _height(rows: int, one: bool, like: Tensor) -> int:
    """Rows of a step's products, padded: for one new token to a height of both, for more to their tiles."""
    dim, dtype = like.shape[-1], like.dtype
    first, second = (
        heights.agreeing(heights.scores, dim, BLOCK, dtype), heights.agreeing(heights.shares, BLOCK, dim, dtype)
    )  # fmt: skip
    return heights.common(first, second, rows) if one else rows + -rows % max(first.tiles[0], second.tiles[0])


def _parts(limit: Tensor, blocks: int) -> list[tuple[int, int]]:
    """`Paging.parts` from the last positions that rows see, int64 [B, rows]."""
    highest, lowest = limit.amax(0), limit.amin(0)
    parts = []
    for start in range(0, blocks * BLOCK, BLOCK):
        unseen = int((highest >= start).int().argmax())  # rows before the first that sees a key
        partial = (lowest < start + BLOCK - 1).nonzero()
        parts.append((unseen // _STRIDE * _STRIDE, int(partial[-1]) + 1 if len(partial) else 0))
    return parts


def _after(limit: Tensor, first: int, blocks: int) -> Tensor:
    """bool [B, blocks, 1, rows, 64]: keys of blocks from `first` on that lie after each query."""
    at = torch.arange(first * BLOCK, (first + blocks) * BLOCK, device=limit.device)
    return at.view(1, blocks, 1, 1, BLOCK) > limit


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, pages: Paging, scale: float) -> Tensor:
    """Attention of new tokens over a paged cache that already holds their own keys and values.

    q [B, T, H, D]; keys and values [blocks, V, 64, D]. Returns [B, T, H, D] in q's dtype, with the same bits for each
    query as `packed_attention`. Blocks are added in ascending order, however many are computed at once.
    """
    batch, steps, query_heads, dim = q.shape
    heads = keys.shape[1]
    group = query_heads // heads
    rows = q.view(batch, steps, heads, group, dim).transpose(1, 2).reshape(batch, heads, steps * group, dim)
    extra = pages.limit.shape[3] - rows.shape[2]
    rows = F.pad(rows, (0, 0, 0, extra)) if extra else rows
    # A single new token takes all blocks in one batched product, whose members do not influence each other. More tokens
    # go block by block, which bounds memory.
    attend = _all_at_once if steps == 1 else _one_by_one
    out, total = attend(rows, keys, values, pages, scale)
    out = (out / total[..., None])[:, :, : steps * group].to(q.dtype)
    return out.view(batch, heads, steps, group, dim).transpose(1, 2).reshape(batch, steps, query_heads, dim)


def _all_at_once(rows: Tensor, keys: Tensor, values: Tensor, pages: Paging, scale: float) -> tuple[Tensor, Tensor]:
    """rows [B, V, R, D] of one new token each -> (weighted values float32 [B, V, R, D], sums float32 [B, V, R])."""
    (batch, heads, height, dim), count = rows.shape, pages.blocks
    spread = rows[:, None].expand(batch, count, heads, height, dim).reshape(-1, height, dim)
    s = paged_product(spread, keys, pages.table, (BLOCK, dim), transposed=True).float()
    s = s.mul_(scale).view(batch, count, heads, height, BLOCK)
    seen = (pages.lowest + 1) // BLOCK  # blocks that every query sees whole
    if seen < count and pages.hidden is not None:
        s[:, seen:].masked_fill_(pages.hidden[:, seen:], -torch.inf)
    top = s.amax(-1).cummax(1).values
    p = s.sub_(top[..., None]).exp_()
    sums = p.sum(-1)
    shares = p.to(values.dtype).view(-1, height, BLOCK)
    more = paged_product(shares, values, pages.table, (BLOCK, dim), transposed=False)
    more = more.view(batch, count, heads, height, dim)
    if count == 1:
        return more[:, 0].float(), sums[:, 0]
    # The sums are a last column of the weighted values, so that a block takes two operations.
    both = more.new_empty(count, batch, heads, height, dim + 1, dtype=torch.float32)
    both[..., :dim].copy_(more.transpose(0, 1))
    both[..., dim].copy_(sums.transpose(0, 1))
    fades = torch.exp(top[:, :-1] - top[:, 1:])[..., None]
    parts = both.unbind(0)
    for fade, part in zip(fades.unbind(1), parts[1:], strict=True):
        parts[0].mul_(fade).add_(part)
    return parts[0][..., :dim], parts[0][..., dim]


def _one_by_one(rows: Tensor, keys: Tensor, values: Tensor, pages: Paging, scale: float) -> tuple[Tensor, Tensor]:
    """As `_all_at_once`, for any number of new tokens. Rows that see none of a block's keys are left out."""
    batch, heads, height, dim = rows.shape
    query, table = rows.reshape(-1, height, dim), pages.table.view(batch, pages.blocks)
    peak = total = out = None
    for block, (at, end) in dispatch.repeated([*enumerate(pages.parts)]):
        ks, vs = (x.index_select(0, table[:, block]).view(-1, BLOCK, dim) for x in (keys, values))
        s = heights.batched(heights.scores, query[:, at:], ks).float().mul_(scale)
        s = s.view(batch, heads, height - at, BLOCK)
        if end > at:
            s[:, :, : end - at].masked_fill_(_after(pages.limit[:, :, :, at:end], block, 1)[:, 0], -torch.inf)
        top = s.amax(-1)
        if peak is not None:
            top = torch.maximum(top, peak[:, :, at:])
        p = s.sub_(top[..., None]).exp_()
        sums = p.sum(-1)
        more = heights.batched(heights.shares, p.to(values.dtype).view(-1, height - at, BLOCK), vs)
        more = more.view(batch, heads, height - at, dim)
        if peak is None or total is None or out is None:
            peak, total, out = top, sums, more.to(torch.float32, copy=True)
            continue
        fade = torch.exp(peak[:, :, at:] - top)
        total[:, :, at:].mul_(fade).add_(sums)
        out[:, :, at:].mul_(fade[..., None]).add_(more)
        peak[:, :, at:] = top
    assert out is not None and total is not None
    return out, total


def ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float
) -> Tensor:
    """`cached_attention` of packed new tokens q [N, H, D]: lengths[b] of them from position starts[b] on -> [N, H, D].

    It does in one call what a step of the model does with the places that its layers share.
    """
    steps, device = max(lengths), q.device
    grid = torch.tensor(starts, device=device)[:, None] + torch.arange(steps, device=device)
    real = (torch.arange(steps) < torch.tensor(lengths)[:, None]).view(-1).nonzero()[:, 0].to(device)
    wide = q.new_zeros(len(lengths) * steps, *q.shape[1:]).index_copy_(0, real, q)
    pages = paging(table, grid, q.shape[1] // keys.shape[1], q)
    out = cached_attention(wide.view(len(lengths), steps, *q.shape[1:]), keys, values, pages, scale)
    return out.flatten(0, 1).index_select(0, real)
