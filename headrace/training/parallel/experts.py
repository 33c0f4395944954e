"""Experts in different processes: rows are sent to them and back (GShard, arXiv 2006.16668).

Idea: each process of an expert group owns an equal run of experts. A layer's rows are sorted by owner, sent, multiplied
there by the operators that a single process uses, and sent back; the sum over slots under the gates is computed in the
process that sent the rows. Sending changes only the order of rows, and a row's bits do not depend on the rows beside
it: in exact mode the forward pass gives the same bits as on one process.

An owner multiplies the rows of all processes at once, so its gradient is the sum over the processes of its group. Gates
are sent with the rows, because they multiply the gradient inside the experts; a gated gradient would be rounded before
it is sent.

Processes send each other unequal numbers of rows, so they exchange the counts first, and the host waits for them.
Recorded routes are known before a pass: one exchange then gives the counts of all layers (`ExpertParallel.counts`).

With several expert groups a run of experts is cut once more: each process stores float32 masters of its part, and the
parts are rounded as they are served and gathered from the other groups before they are multiplied. Backward adds the
gradients of the groups with a reduce-scatter in float32, and over copies of the state with an all-reduce.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels import operators
from headrace.policy.moe import ExpertFunction, RowCounts
from headrace.training.figures.clock import Clock
from headrace.training.parallel.group import gather, scatter_sum


class Groups(NamedTuple):
    """The processes that an `ExpertParallel` exchanges with."""

    owners: dist.ProcessGroup
    """Those that together own one copy of the experts."""
    run: dist.ProcessGroup
    """Those of a copy of the state that share the same run of experts."""
    copies: dist.ProcessGroup
    """Those that hold the same rows, one in each copy of the state."""
    clock: Clock
    """Gets the time of every exchange."""

    def added(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The sum over all processes of a gradient of their experts, float32: this process's part, shaped `like`."""
        whole = gradient.to(torch.float32)
        with self.clock.transfer():
            if self.run.size() > 1:
                out = torch.empty_like(like, dtype=torch.float32)
                scatter_sum(out, whole.contiguous(), self.run)
                whole = out
            if self.copies.size() > 1:
                dist.all_reduce(whole, group=self.copies)
        return whole


class _Exchange(torch.autograd.Function):
    """Send rows to the processes that own them; the gradient is sent back in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], groups: Groups) -> Tensor:
        ctx.ways = sent, got, groups
        return _swap(x, sent, got, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got, groups = ctx.ways
        return _swap(grad, got, sent, groups), None, None, None


class _Gathered(torch.autograd.Function):
    """Gathers the shards [e, ...] of one run of experts as they are served. Backward adds this process's part of the
    gradient of all processes to `shard.grad`."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, served: Callable[[Tensor], Tensor], groups: Groups) -> Tensor:
        ctx.shard, ctx.groups, group = shard, groups, groups.run
        local = served(shard.detach()).contiguous()
        out = local.new_empty(group.size() * len(local), *local.shape[1:])
        if group.size() == 1:
            out.copy_(local)
        else:
            with groups.clock.transfer():
                gather(out, local, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        shard = ctx.shard
        part = ctx.groups.added(gradient, shard)
        shard.grad = part if shard.grad is None else shard.grad.add_(part)
        return None, None, None


class _Sorted(torch.autograd.Function):
    """`operators.permute`; a token's gradients are added in slot order, not in the order of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.tokens = len(x)
        return operators.permute(x, source, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        ones = torch.ones(ctx.tokens, len(slots) // ctx.tokens, device=grad.device)
        return operators.unpermute(grad, slots, ones), None, None


class _Product(torch.autograd.Function):
    """Rows [n, D] through one expert each, without their gates float32 [n, 1]; backward multiplies by the gates where
    the experts of a single process do. Its incoming gradient is that of the sum over slots."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, grid: str
    ) -> Tensor:
        ones = torch.ones_like(gates)
        out, inner = operators.experts_forward(x, ones, experts, gate_up, down, exact, grid)
        ctx.save_for_backward(x, gates, experts, gate_up, down, inner)
        ctx.how = exact, grid
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        learn = ctx.needs_input_grad[3:5]
        g_x, g_gates, *weights = operators.experts_backward(grad, *ctx.saved_tensors, *ctx.how, *learn)
        return (
            g_x,
            g_gates,
            None,
            *(each if learns else None for each, learns in zip(weights, learn, strict=True)),
            None,
            None,
        )


class _Summed(torch.autograd.Function):
    """`operators.unpermute` of the products; its gradient has no gates, because `_Product` multiplies by them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, gates: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(slots, source)
        return operators.unpermute(rows, slots, gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        slots, source = ctx.saved_tensors
        return operators.permute(grad.contiguous(), source, slots), None, None, None


class _OnGrid(torch.autograd.Function):
    """Rounds weights to the grid on which they are served; the gradient passes unchanged (straight-through)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Any) -> Tensor:
        rounded: Tensor = cast(weight)
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class OnGrid:
    """`moe.ExpertFunction` that rounds its weights at every call, because the stored parameters are masters."""

    def __init__(self, function: ExpertFunction, cast: Any) -> None:
        self.function, self.cast = function, cast

    def __call__(
        self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, /
    ) -> Tensor:
        """As `expert_mlp`."""
        up, out = (_OnGrid.apply(weight, self.cast) for weight in (gate_up, down))  # type: ignore[no-untyped-call]
        return self.function(x, gates, experts, up, out, exact)


def _swap(x: Tensor, sent: Sequence[int], got: Sequence[int], groups: Groups) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    with groups.clock.transfer():
        dist.all_to_all_single(out, x.contiguous(), list(got), list(sent), group=groups.owners)
    return out


class ExpertParallel:
    """`moe.OwnedExperts` over a group."""

    def __init__(self, groups: Groups, each: int, dtype: torch.dtype, quantised: bool) -> None:
        """each: number of an owner's experts. dtype: of the served weights. quantised: they and the inputs of the
        products are in MXFP8."""
        self.groups, self.each, self.dtype, self.quantised = groups, each, dtype, quantised

    def counts(self, experts: Tensor) -> list[RowCounts] | None:
        """As `moe.OwnedExperts`. The host waits once."""
        owners, layers = self.groups.owners.size(), experts.shape[1]
        complete = (experts >= 0).all().to(torch.int64)
        # A bin for each layer and owner: a few operations for any number of layers. `bincount` would make the host wait
        # on a GPU.
        bins = self._owner(experts.clamp(min=0)) + torch.arange(layers, device=experts.device)[:, None] * owners
        flat = bins.flatten()
        rows = torch.zeros(layers * owners, dtype=torch.int64, device=experts.device)
        rows = rows.scatter_add(0, flat, torch.ones_like(flat)).view(layers, owners).T
        sent = torch.cat((complete.expand(owners, 1), rows), 1)
        single = [1] * owners
        told = torch.stack((sent, _swap(sent, single, single, self.groups))).cpu().tolist()
        if not all(complete for complete, *_ in told[1]):
            return None
        return [RowCounts(*([row[at] for row in side] for side in told)) for at in range(1, 1 + layers)]

    def __call__(
        self,
        x: Tensor,
        gates: Tensor,
        experts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        exact: bool,
        counts: RowCounts,
        /,
    ) -> Tensor:
        """As `moe.OwnedExperts`; gate_up and down are this process's float32 shards."""
        groups, (sent, got) = self.groups, counts
        up, out = (self._gathered(shard) for shard in (gate_up, down))
        k = experts.shape[1]
        flat = experts.reshape(-1)
        owner = self._owner(flat)
        order = owner.argsort(stable=True)
        slots, source = order.argsort(), order // k
        local = _swap((flat - owner * self.each)[order], sent, got, groups)
        ordered = _Sorted.apply(x, source, slots), gates.reshape(-1, 1)[order]  # type: ignore[no-untyped-call]
        rows, weights = (_Exchange.apply(each, sent, got, groups) for each in ordered)  # type: ignore[no-untyped-call]
        done = self._product(rows, weights, local[:, None], up, out, exact)
        back: Tensor = _Exchange.apply(done, got, sent, groups)  # type: ignore[no-untyped-call]
        summed: Tensor = _Summed.apply(back, slots, gates, source)  # type: ignore[no-untyped-call]
        return summed

    def _gathered(self, shard: Tensor) -> Tensor:
        """All experts of this process's run, [e, rows, n]."""
        whole: Tensor = _Gathered.apply(shard, self._served, self.groups)  # type: ignore[no-untyped-call]
        return whole.view(self.each, -1, shard.shape[-1])

    def _owner(self, experts: Tensor) -> Tensor:
        return experts.div(self.each, rounding_mode="floor")

    def _served(self, masters: Tensor) -> Tensor:
        served = masters.to(self.dtype)
        return operators.rounded(served) if self.quantised else served

    def _product(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool) -> Tensor:
        """The products of all rows. Where there are none, a row of zeros is appended and multiplied: all
        processes take part in the exchanges of the backward pass, and no kernel gets a product without rows."""
        count = len(x)
        if not count:
            x, gates, experts = (torch.cat((each, each.new_zeros(1, each.shape[1]))) for each in (x, gates, experts))
        grid = "mxfp8" if self.quantised else ""
        out: Tensor = _Product.apply(x, gates, experts, gate_up, down, exact, grid)  # type: ignore[no-untyped-call]
        return out[:count]
