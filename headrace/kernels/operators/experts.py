"""Routing to experts, the experts' SwiGLU, and the rows that are sent to experts in other processes."""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch, expert_mlp, grouped_mm
from headrace.kernels import permute as places
from headrace.kernels.block_scaled import product as block_scaled
from headrace.kernels.elementwise.swiglu import swiglu_backward_triton, swiglu_triton
from headrace.kernels.operators import formats, library
from headrace.kernels.route import SOFTMAX, Rule, route_backward
from headrace.kernels.route import route as route_twin
from headrace.kernels.route_topk import route_backward_triton, route_triton


@torch.library.custom_op("headrace::route", mutates_args=(), device_types="cpu")
def _route(
    logits: Tensor, k: int, normalise: bool, replay: Tensor | None, correction: Tensor | None,
    sigmoid: bool, groups: int, kept: int, scale: float, plausible: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rule = Rule(sigmoid, groups, kept, scale, plausible)
    gates, experts = route_twin(logits, k, normalise, replay, rule, correction)
    return gates, experts.clone() if experts is replay else experts


@_route.register_kernel("cuda")
def _(
    logits: Tensor, k: int, normalise: bool, replay: Tensor | None, correction: Tensor | None,
    sigmoid: bool, groups: int, kept: int, scale: float, plausible: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return route_triton(logits, k, normalise, replay, Rule(sigmoid, groups, kept, scale, plausible), correction)


@_route.register_fake
def _(
    logits: Tensor, k: int, normalise: bool, replay: Tensor | None, correction: Tensor | None,
    sigmoid: bool, groups: int, kept: int, scale: float, plausible: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = logits.shape[0]
    return logits.new_empty(rows, k, dtype=torch.float32), logits.new_empty(rows, k, dtype=torch.int64)


@torch.library.custom_op("headrace::route_backward", mutates_args=(), device_types="cpu")
def _route_backward(
    grad: Tensor, logits: Tensor, experts: Tensor, normalise: bool, sigmoid: bool, scale: float
) -> Tensor:
    return route_backward(grad, logits, experts, normalise, Rule(sigmoid, scale=scale))


@_route_backward.register_kernel("cuda")
def _(grad: Tensor, logits: Tensor, experts: Tensor, normalise: bool, sigmoid: bool, scale: float) -> Tensor:
    return route_backward_triton(grad, logits, experts, normalise, Rule(sigmoid, scale=scale))


@_route_backward.register_fake
def _(grad: Tensor, logits: Tensor, experts: Tensor, normalise: bool, sigmoid: bool, scale: float) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep_route(ctx: Any, inputs: Any, output: Any) -> None:
    logits, _, ctx.normalise, _, _, ctx.sigmoid, _, _, ctx.scale, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _pull_route(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pulled = torch.ops.headrace.route_backward(grad, *ctx.saved_tensors, ctx.normalise, ctx.sigmoid, ctx.scale)
    return pulled, *[None] * 9


_route.register_autograd(_pull_route, setup_context=_keep_route)


def route(
    logits: Tensor,
    k: int,
    normalise: bool,
    replay: Tensor | None = None,
    rule: Rule = SOFTMAX,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [N, E] -> (gate scores float32 [N, k], experts int64 [N, k]); see `kernels.route.route`."""
    if dispatch.twin(logits):
        return route_twin(logits, k, normalise, replay, rule, correction)
    gates, experts = torch.ops.headrace.route(logits, k, normalise, replay, correction, *rule)
    return gates, experts


def _capacity(experts: Tensor, down: Tensor) -> int:
    """An upper bound of the rows for a number of (token, slot) pairs, for every selection and device. At most as many
    experts as there are pairs have rows."""
    pairs = experts.shape[0] * experts.shape[1]
    return pairs + min(down.shape[0], pairs) * grouped_mm.TILE + grouped_mm.TILE


def experts_twin(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str
) -> tuple[Tensor, Tensor]:
    """(`experts`, inner activations) on a CPU."""
    cast = formats.cast(grid)
    p = expert_mlp.plan(experts, gate_up.shape[0], expert_mlp.tile(gate_up, down, exact))
    out, inner = expert_mlp.expert_forward(cast(x), gates, gate_up, down, p, cast, exact)
    padded = inner.new_zeros(_capacity(experts, down), inner.shape[1])
    padded[: p.rows] = inner
    return out, padded


_experts = torch.library.custom_op("headrace::experts", experts_twin, mutates_args=(), device_types="cpu")


def experts_triton(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str
) -> tuple[Tensor, Tensor]:
    """(`experts`, inner activations) on a GPU; nothing waits for the device."""
    p = places.plan_triton(experts, gate_up.shape[0], grouped_mm.TILE, _capacity(experts, down))
    rounded = formats.cast(grid)
    if grid and block_scaled.used(len(p.source), len(gate_up), exact, x.device):
        rows = formats.activations(places.permute_triton(x, p.source), grid)
        inner = block_scaled.scaled_mm_triton(rows, formats.weights(gate_up, grid, 2), p.ends, x.dtype)
        quantised = formats.activations(swiglu_triton(inner), grid)
        outer = block_scaled.scaled_mm_triton(quantised, formats.weights(down, grid), p.ends, x.dtype)
    else:
        forward = library.products(x, down, len(p.source), exact).forward
        inner = forward(places.permute_triton(rounded(x), p.source), gate_up, p.ends, x.dtype)
        middle = rounded(swiglu_triton(inner))
        outer = forward(middle, down, p.ends, x.dtype)
    return places.unpermute_triton(outer, p.slots, gates), inner


_experts.register_kernel("cuda")(experts_triton)


@_experts.register_fake
def _(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str
) -> tuple[Tensor, Tensor]:
    capacity = _capacity(experts, down)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(capacity, gate_up.shape[1])


def experts_backward_twin(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, inner: Tensor, exact: bool,
    grid: str, up_learns: bool, down_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gates, gate_up and down on a CPU; empty for weights that do not learn."""
    cast = formats.cast(grid)
    p = expert_mlp.plan(experts, gate_up.shape[0], expert_mlp.tile(gate_up, down, exact))
    g_x, g_gates, g_up, g_down = expert_mlp.expert_backward(
        grad, cast(x), gates, gate_up, down, inner[: p.rows], p, cast, (up_learns, down_learns)
    )
    g_up = gate_up.new_empty(0) if g_up is None else g_up
    return g_x.contiguous(), g_gates, g_up, down.new_empty(0) if g_down is None else g_down


_experts_backward = torch.library.custom_op(
    "headrace::experts_backward", experts_backward_twin, mutates_args=(), device_types="cpu"
)


def experts_backward_triton(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, inner: Tensor, exact: bool,
    grid: str, up_learns: bool, down_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gates, gate_up and down on a GPU; empty for weights that do not learn. With the Triton products
    in one order: no atomics."""
    _, dgrad, wgrad = library.products(x, down, len(inner), exact)
    p = places.plan_triton(experts, gate_up.shape[0], grouped_mm.TILE, len(inner))
    rounded = formats.cast(grid)
    grads = places.permute_triton(grad, p.source)
    gate = gates.new_zeros(len(inner)).index_copy_(0, p.slots, gates.reshape(-1))[:, None]
    middle = rounded(swiglu_triton(inner))
    g_middle = dgrad(grads, down, p.ends, x.dtype)
    g_gate = (g_middle.float() * middle).sum(-1)
    g_up, g_down = gate_up.new_empty(0), down.new_empty(0)
    if down_learns:
        g_down = wgrad(grads, (middle * gate).to(x.dtype), p.ends, down.dtype)
    g_inner = swiglu_backward_triton(inner, g_middle.mul_(gate))
    if up_learns:
        g_up = wgrad(g_inner, places.permute_triton(rounded(x), p.source), p.ends, gate_up.dtype)
    g_rows = dgrad(g_inner, gate_up, p.ends, x.dtype)
    g_x = places.unpermute_triton(g_rows, p.slots, torch.ones_like(gates))
    return g_x, g_gate.index_select(0, p.slots).view_as(gates), g_up, g_down


_experts_backward.register_kernel("cuda")(experts_backward_triton)


@_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, inner: Tensor, exact: bool,
    grid: str, up_learns: bool, down_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    g_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    g_up, g_down = (
        torch.empty_like(each) if learns else each.new_empty(0)
        for each, learns in ((gate_up, up_learns), (down, down_learns))
    )
    return g_x, torch.empty_like(gates), g_up, g_down


def _keep_experts(ctx: Any, inputs: Any, output: Any) -> None:
    *operands, ctx.exact, ctx.grid = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*operands, output[1])


def _pull_experts(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pull = torch.ops.headrace.experts_backward
    up_learns, down_learns = ctx.needs_input_grad[3:5]
    g_x, g_gates, g_up, g_down = pull(
        grad.contiguous(), *ctx.saved_tensors, ctx.exact, ctx.grid, up_learns, down_learns
    )
    return g_x, g_gates, None, g_up if up_learns else None, g_down if down_learns else None, None, None


_experts.register_autograd(_pull_experts, setup_context=_keep_experts)


def experts_forward(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str
) -> tuple[Tensor, Tensor]:
    """(`experts`, what `experts_backward` needs of its inner activations), not differentiable."""
    if dispatch.twin(x):
        return experts_twin(x, gates, experts, gate_up, down, exact, grid)
    out, inner = torch.ops.headrace.experts(x, gates, experts, gate_up, down, exact, grid)
    return out, inner


def experts_backward(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, inner: Tensor, exact: bool,
    grid: str, up_learns: bool, down_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gates, gate_up and down from that of `experts`; empty for weights that do not learn."""
    function = experts_backward_twin if dispatch.twin(x) else torch.ops.headrace.experts_backward
    g_x, g_gates, g_up, g_down = function(
        grad.contiguous(), x, gates, experts, gate_up, down, inner, exact, grid, up_learns, down_learns
    )
    return g_x, g_gates, g_up, g_down


def experts(
    x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str = ""
) -> Tensor:
    """x [N, D] through the experts int64 [N, k] under gates float32 [N, k] -> [N, D]. Differentiable in x, gates,
    gate_up and down.

    grid: the number format of the weights, to which the inputs of each product are rounded, row by row.
    """
    if dispatch.twin(x):
        return expert_mlp.expert_mlp(x, gates, experts, gate_up, down, exact, formats.cast(grid))
    out: Tensor = torch.ops.headrace.experts(x, gates, experts, gate_up, down, exact, grid)[0]
    return out


@torch.library.custom_op("headrace::permute", mutates_args=(), device_types="cpu")
def _permute(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    return places.permute(x, source)


@_permute.register_kernel("cuda")
def _(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    return places.permute_triton(x, source)


@_permute.register_fake
def _(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


@torch.library.custom_op("headrace::unpermute", mutates_args=(), device_types="cpu")
def _unpermute(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    return places.unpermute(rows, slots, gates)


@_unpermute.register_kernel("cuda")
def _(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    return places.unpermute_triton(rows, slots, gates)


@_unpermute.register_fake
def _(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    return rows.new_empty(gates.shape[0], rows.shape[1])


@torch.library.custom_op("headrace::unpermute_backward", mutates_args=(), device_types="cpu")
def _unpermute_backward(grad: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    return places.unpermute_backward(grad, rows, slots, gates)


@_unpermute_backward.register_kernel("cuda")
def _(grad: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    return places.unpermute_backward_triton(grad, rows, slots, gates)


@_unpermute_backward.register_fake
def _(grad: Tensor, rows: Tensor, slots: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(gates)


def _keep_permute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.tokens = inputs[0].shape[0]
    ctx.save_for_backward(inputs[2])


def _pull_permute(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (slots,) = ctx.saved_tensors
    gates = torch.ones(ctx.tokens, slots.shape[0] // max(ctx.tokens, 1), dtype=torch.float32, device=grad.device)
    return torch.ops.headrace.unpermute(grad, slots, gates), None, None


def _keep_unpermute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _pull_unpermute(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    g_rows, g_gates = torch.ops.headrace.unpermute_backward(grad, *ctx.saved_tensors)
    return g_rows, None, g_gates


_permute.register_autograd(_pull_permute, setup_context=_keep_permute)
_unpermute.register_autograd(_pull_unpermute, setup_context=_keep_unpermute)


def permute(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """x [N, D] -> [P, D]: row p is token source[p]. slots int64 [N * k]: the row of each (token, slot) pair."""
    if dispatch.twin(x):
        return places.permute(x, source)
    out: Tensor = torch.ops.headrace.permute(x, source, slots)
    return out


def unpermute(rows: Tensor, slots: Tensor, gates: Tensor) -> Tensor:
    """rows [P, D], gates float32 [N, k] -> [N, D]: each token's rows under its gates, added in slot order."""
    if dispatch.twin(rows):
        return places.unpermute(rows, slots, gates)
    out: Tensor = torch.ops.headrace.unpermute(rows, slots, gates)
    return out
