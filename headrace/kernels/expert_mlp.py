"""SwiGLU of a mixture of experts: rows are grouped by expert, each group takes two products, and each token gathers its
outputs by slot.

Idea: sort (token, slot) pairs by expert, pad each expert's part to a multiple of the smallest tile that exact mode
allows (`heights`), and multiply part by part. Each token then gathers its k outputs and adds
them in slot order. Nothing is added by atomics or by index, so a token's sum depends on its own row alone.

Layout: gate_up [E, 2I, D] holds the gate's rows before the up projection's; down [E, D, I]. A part is a slice of one
buffer [P, ...], so parts are never concatenated. Padding rows repeat token 0 with a gate of 0: rows are independent, no
slot gathers a padding row, and its gradient is exactly 0.

A `cast` rounds the inputs of the two products (see `mxfp8`). Backward uses the rounded inputs and treats the rounding
as the identity (straight-through).

Trade-off: backward is written by hand. It keeps the inner activations and gathers the rest again, which is less memory
traffic than autograd's saved tensors. The row layout is computed with numpy on the CPU, because part sizes are needed
there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import batch_invariant, heights
from headrace.kernels.heights import Heights

Cast = Callable[[Tensor], Tensor]


def as_is(x: Tensor) -> Tensor:
    """The cast of experts that are multiplied in the policy's own dtype."""
    return x


class RowLayout(NamedTuple):
    """The row of each (token, slot) pair. parts: (expert, first row, end row) of the experts that have rows."""

    parts: list[tuple[int, int, int]]
    rows: int
    source: Tensor
    """int64 [P]: token of each row."""
    slots: Tensor
    """int64 [N * k]: row of each (token, slot)."""


def plan(experts: Tensor, count: int, tile: int) -> RowLayout:
    """experts int64 [N, k], each below `count`. A part has a multiple of `tile` rows."""
    k = experts.shape[1]
    flat = experts.cpu().numpy().reshape(-1)
    order = flat.astype(np.uint16).argsort(kind="stable")  # 16 bits: numpy takes its radix sort
    sizes = np.bincount(flat, minlength=count)
    padded = -(-sizes // tile) * tile
    ends = padded.cumsum()
    place = np.arange(len(flat)) + (ends - padded - sizes.cumsum() + sizes).repeat(sizes)
    rows = int(ends[-1])
    source = np.zeros(rows, np.int64)
    source[place] = order // k
    slots = np.empty(len(flat), np.int64)
    slots[order] = place
    parts = [
        (e, end - size, end) for e, (end, size) in enumerate(zip(ends.tolist(), padded.tolist(), strict=True)) if size
    ]
    return RowLayout(
        parts, rows, torch.from_numpy(source).to(experts.device), torch.from_numpy(slots).to(experts.device)
    )


def tile(gate_up: Tensor, down: Tensor, exact: bool) -> int:
    """The rows of which a part has a multiple; 1 in ordinary mode."""
    return max(_heights(each).tiles[0] for each in (gate_up, down)) if exact else 1


def _heights(weights: Tensor) -> Heights:
    return heights.agreeing(heights.linear, weights.shape[2], weights.shape[1], weights.dtype)


def products(x: Tensor, weights: Tensor, p: RowLayout, exact: bool) -> Tensor:
    """Each part of x [P, K] by its expert's matrix of [E, N, K] -> [P, N]. No gradient."""
    out = x.new_empty(p.rows, weights.shape[1])
    whole = not exact or _heights(weights).whole
    for expert, first, end in p.parts:
        for height in [end - first] if whole else _heights(weights).pieces(end - first):
            torch.mm(x[first : first + height], weights[expert].T, out=out[first : first + height])
            first += height
    return out


def _combine(outer: Tensor, gates: Tensor, p: RowLayout) -> Tensor:
    """outer [P, D], gates float32 [N, k] -> [N, D], slots added in order."""
    k = gates.shape[1]
    weighted = outer.index_select(0, p.slots).view(-1, k, outer.shape[1]).float() * gates[..., None]
    out = weighted[:, 0]
    for slot in range(1, k):
        out = out + weighted[:, slot]
    return out.to(outer.dtype)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, p: RowLayout, cast: Cast, exact: bool
    ) -> Tensor:
        x = cast(x)
        out, inner = expert_forward(x, gates, gate_up, down, p, cast, exact)
        ctx.save_for_backward(x, gates, gate_up, down, inner)
        ctx.plan, ctx.cast = p, cast
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, gate_up, down, inner = ctx.saved_tensors
        learn = ctx.needs_input_grad[2:4]  # frozen experts cost no product of a weight's gradient
        return *expert_backward(grad, x, gates, gate_up, down, inner, ctx.plan, ctx.cast, learn), None, None, None


def expert_forward(
    x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, p: RowLayout, cast: Cast, exact: bool
) -> tuple[Tensor, Tensor]:
    """(`expert_mlp`, its inner activations [P, 2I]); x is cast already."""
    inner = products(x.index_select(0, p.source), gate_up, p, exact)
    return _combine(products(cast(batch_invariant.swiglu(inner)), down, p, exact), gates, p), inner


def expert_backward(
    grad: Tensor, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, inner: Tensor, p: RowLayout, cast: Cast,
    learn: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, gates, gate_up and down from that of `expert_mlp`; x is cast already. learn: whether gate_up and
    down do; None instead of the gradient where not.

    Its rows are the largest temporary tensors of a backward pass, so each is freed after its last use.
    """
    k, dim = gates.shape[1], x.shape[1]
    gate = gates.new_zeros(p.rows).index_copy_(0, p.slots, gates.reshape(-1))[:, None]
    grads = grad.index_select(0, p.source)
    middle = cast(batch_invariant.swiglu(inner))
    g_gate_up, g_down = (
        torch.zeros_like(each) if learns else None for each, learns in zip((gate_up, down), learn, strict=True)
    )
    g_middle = torch.empty_like(middle)
    for expert, first, end in p.parts:
        torch.mm(grads[first:end], down[expert], out=g_middle[first:end])
    g_gate = (g_middle.float() * middle).sum(-1)
    if g_down is not None:
        weighted = (middle * gate).to(middle.dtype)
        for expert, first, end in p.parts:
            torch.mm(grads[first:end].T, weighted[first:end], out=g_down[expert])
        del weighted
    del grads, middle
    g_inner = batch_invariant.swiglu_backward(inner, g_middle.mul_(gate))
    del g_middle
    g_rows = x.new_empty(p.rows, dim)
    for expert, first, end in p.parts:
        torch.mm(g_inner[first:end], gate_up[expert], out=g_rows[first:end])
    if g_gate_up is not None:
        rows = x.index_select(0, p.source)
        for expert, first, end in p.parts:
            torch.mm(g_inner[first:end].T, rows[first:end], out=g_gate_up[expert])
        del rows
    del g_inner
    g_slots = g_rows.index_select(0, p.slots).view(-1, k, dim)
    del g_rows
    g_x = g_slots[:, 0] if k == 1 else g_slots.sum(1)
    return g_x, g_gate.index_select(0, p.slots).view(-1, k), g_gate_up, g_down


def expert_mlp(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, cast: Cast = as_is
) -> Tensor:
    """x [N, D] through its experts, int64 [N, k], weighted by gates float32 [N, k] -> [N, D] in x's dtype.

    gate_up [E, 2I, D], down [E, D, I]. Differentiable in x, gates, gate_up and down. cast: [N, K] -> [N, K], row by
    row, rounds the input of each product.
    """
    p = plan(experts, gate_up.shape[0], tile(gate_up, down, exact))
    if torch.is_grad_enabled():
        out: Tensor = _ExpertMlp.apply(x, gates, gate_up, down, p, cast, exact)  # type: ignore[no-untyped-call]
        return out
    return expert_forward(cast(x), gates, gate_up, down, p, cast, exact)[0]
