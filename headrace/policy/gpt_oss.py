"""Computes what gpt-oss adds to a layer: attention sinks, a sliding window, experts with biases and a clamped SwiGLU.

Idea: a sink is one more score of a head in the softmax, without a value (arXiv 2309.17453). The online softmax over
blocks of 64 keys starts with it: peak = sink, total = 1. All numbers are finite from the start, and a block that is
wholly masked changes no bit, so a window is only a mask, and blocks before it are left out. Packed sequences and a
cache take the blocks in the same order, so that a position has the same bits either way, as in
`kernels.block_attention`.

Trade-off: autograd differentiates the loop over blocks, in exact mode and in ordinary mode. That costs time and memory
on long sequences: the scores of all visible blocks are kept for the backward pass.
Dimensions: as in `kernels.block_attention` and `kernels.expert_mlp`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import block_attention, dispatch, expert_mlp, heights
from headrace.kernels.batch_invariant import linear
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.policy.cache import KVCache, Step
from headrace.policy.config import ALPHA

_State = tuple[Tensor, Tensor, Tensor]


def _block(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, state: _State, exact: bool) -> _State:
    """One block of keys into the online softmax: q [B, R, D], k and v [B, 64, D], hidden bool that expands to
    [B, R, 64]. state: peak and total float32 [B, R], out float32 [B, R, D]."""
    peak, total, out = state
    s = (heights.batched(heights.scores, q, k, exact).float() * scale).masked_fill(hidden, -torch.inf)
    # The result does not depend on the peak, so it needs no gradient.
    top = torch.maximum(peak, s.detach().amax(-1))
    p = torch.exp(s - top[..., None])
    fade = torch.exp(peak - top)
    more = heights.batched(heights.shares, p.to(v.dtype), v, exact).float()
    return top, total * fade + p.sum(-1), out * fade[..., None] + more


def _start(sinks: Tensor, dim: int) -> _State:
    """The state before the first block. sinks float32 [B, R]."""
    peak = sinks.detach()
    return peak, torch.exp(sinks - peak), sinks.new_zeros(*sinks.shape, dim)


def packed(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, packing: Packing, scale: float, exact: bool, window: int
) -> Tensor:  # fmt: skip
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D], sinks [H] -> [N, H, D].

    window: a query sees that many keys, its own among them; 0 is all. Differentiable.
    """
    heads, dim = k.shape[1:]
    group = q.shape[1] // heads
    result = torch.zeros_like(q)
    for bucket in packing.buckets:
        qs = block_attention.spread(q, bucket, heads, bucket.queries, bucket.query_places)
        ks, vs = (block_attention.spread(x, bucket, heads, bucket.keys, bucket.key_places) for x in (k, v))
        parts = []
        for first in range(0, bucket.queries, BLOCK):
            rows = qs[:, first * group : (first + BLOCK) * group]
            steps = rows.shape[1] // group
            at = torch.arange(first, first + steps, device=q.device).repeat_interleave(group)[:, None]
            start = sinks.float().view(1, heads, 1, group).expand(bucket.sequences, heads, steps, group)
            state = _start(start.reshape(bucket.sequences * heads, -1), dim)
            for block in range(max(0, first - window + 1) // BLOCK if window else 0, first // BLOCK + 1):
                part = slice(block * BLOCK, (block + 1) * BLOCK)
                hidden = _hidden(at, block, window)
                state = _block(rows, ks[:, part], vs[:, part], hidden, scale, state, exact)
            parts.append(state[2] / state[1][..., None])
        out = torch.cat(parts, 1).to(q.dtype)
        block_attention.gather(out, bucket, heads, bucket.queries, bucket.query_places, result)
    return result


def _hidden(at: Tensor, block: int, window: int) -> Tensor:
    """bool [..., 64]: the keys of a block that a query at position `at` [..., 1] does not see."""
    keys = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=at.device)
    return (keys > at) | (keys <= at - window) if window else keys > at


def cached(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, step: Step, cache: KVCache, layer: int, scale: float, exact: bool,
    window: int,
) -> Tensor:  # fmt: skip
    """Write the new keys and values into the cache, then attend over it. Shapes and bits as in `packed`."""
    keys, values = cache.keys[layer], cache.values[layer]
    heads, dim = k.shape[1:]
    keys.view(-1, dim).index_copy_(0, step.places, k.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, step.places, v.reshape(-1, dim))
    group = q.shape[1] // heads
    if step.pages is None:
        step.pages = block_attention.paging(step.table, step.grid, group, q if exact else None)
    limit = step.pages.limit[:, 0, 0]  # [B, rows, 1]
    batch, steps, height = step.batch, step.steps, limit.shape[1]
    extra = height - steps * group
    rows = step.spread(q).view(batch, steps, heads, group, dim).transpose(1, 2).reshape(batch * heads, -1, dim)
    rows = F.pad(rows, (0, 0, 0, extra))
    start = sinks.float().view(1, heads, 1, group).expand(batch, heads, steps, group).reshape(batch * heads, -1)
    state = _start(F.pad(start, (0, extra)), dim)
    first = max(0, step.pages.lowest - window + 1) // BLOCK if window else 0
    for block in dispatch.repeated(range(first, step.pages.blocks)):
        chosen = step.table[:, block]
        ks, vs = (x.index_select(0, chosen).view(-1, BLOCK, dim) for x in (keys, values))
        hidden = _hidden(limit, block, window).repeat_interleave(heads, 0)
        state = _block(rows, ks, vs, hidden, scale, state, exact)
    out = (state[2] / state[1][..., None])[:, : steps * group].to(q.dtype)
    return step.gather(out.view(batch, heads, steps, group, dim).transpose(1, 2).flatten(2, 3))


def activation(gate_up: Tensor, limit: float) -> Tensor:
    """[N, 2I] -> [N, I]: (up + 1) * gate * sigmoid(1.702 gate), clamped; gates and ups take turns in a row."""
    gate = gate_up[:, ::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(min=-limit, max=limit)
    # By hand, because torch's sigmoid rounds the last elements of a buffer differently: see `kernels.route.sigmoid`.
    return (up + 1) * (gate / (1 + torch.exp(-(gate * ALPHA).clamp(min=-80.0))))


class Experts:
    """Experts with biases, as a `moe.ExpertFunction`."""

    def __init__(self, gate_up_bias: Tensor, down_bias: Tensor, limit: float) -> None:
        """gate_up_bias [E, 2I], down_bias [E, D]; limit: see `activation`."""
        self.gate_up_bias, self.down_bias, self.limit = gate_up_bias, down_bias, limit

    def __call__(
        self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, /
    ) -> Tensor:
        """As `moe.ExpertFunction`; gates and ups take turns in the rows of gate_up [E, 2I, D]."""
        p = expert_mlp.plan(experts, len(gate_up), expert_mlp.tile(gate_up, down, exact))
        rows = x.index_select(0, p.source)
        ups, up_biases, downs, down_biases = (w.unbind(0) for w in (gate_up, self.gate_up_bias, down, self.down_bias))
        parts = []
        for expert, first, end in p.parts:
            inner = linear(rows[first:end], ups[expert], exact) + up_biases[expert]
            parts.append(linear(activation(inner, self.limit), downs[expert], exact) + down_biases[expert])
        outer = torch.cat(parts).index_select(0, p.slots).view(len(x), -1, x.shape[1]).float() * gates[..., None]
        out = outer[:, 0]
        for slot in range(1, gates.shape[1]):
            out = out + outer[:, slot]
        return out.to(x.dtype)
