"""Experts in different processes: rows are sent to them and back (GShard, arXiv 2006.16668).

Idea: each process of an expert group owns an equal run of experts. A layer's rows are sorted by owner, sent, multiplied
there by the operators that a single process uses, and sent back; the sum over slots under the gates is computed in the
process that sent the rows. Sending changes only the order of rows, and a row's bits do not depend on the rows beside
it: in exact mode the forward pass gives the same bits as on one process.

Gradients have these bits too. An owner multiplies the rows of each process by themselves, as one process multiplies
the rows of each micro-batch. Gates are sent with the rows, because they multiply the gradient inside the experts; a
gated gradient would be rounded before it is sent. The parts of an expert's gradient are added to the sum so far in the
order of the micro-batches.

With several expert groups a run of experts is cut once more: each process stores float32 masters of its part, and the
parts are rounded as they are served and gathered from the other groups before they are multiplied.

Trade-off: an owner has a gradient of its experts for every process of its group until all of them are added: as many
bytes as one process has for all experts of the layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels import operators
from headrace.policy.moe import ExpertFunction
from headrace.training.figures.clock import Clock
from headrace.training.parallel.group import gather
from headrace.training.parallel.nodes.sums import Sums


class Groups(NamedTuple):
    """The processes that an `ExpertParallel` exchanges with."""

    owners: dist.ProcessGroup
    """Those that together own one copy of the experts."""
    copies: dist.ProcessGroup
    """Those that share the same run of experts."""
    clock: Clock
    """Gets the time of every exchange."""
    sums: Sums
    """Adds the parts of a gradient, also over nodes."""


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
    """Gathers the shards [e, ...] of one run of experts as they are served, once for the rows of each process.

    Backward adds the gradients to `shard.grad` in the order of the processes, which is the order of the micro-batches.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, served: Callable[[Tensor], Tensor], groups: Groups) -> tuple[Tensor, ...]:
        ctx.shard, ctx.groups, group = shard, groups, groups.copies
        local = served(shard.detach()).contiguous()
        out = local.new_empty(group.size() * len(local), *local.shape[1:])
        if group.size() == 1:
            out.copy_(local)
        else:
            with groups.clock.transfer():
                gather(out, local, group)
        return tuple(out.view_as(out) for _ in range(groups.owners.size()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        shard, groups = ctx.shard, ctx.groups
        copies = groups.copies.size()
        computed = torch.stack([grad.view(copies, *shard.shape) for grad in grads], 1)  # [copies, owners, e, ...]
        parts = computed
        if copies > 1:
            parts = torch.empty_like(computed)
            with groups.clock.transfer():
                dist.all_to_all_single(parts, computed, group=groups.copies)
        shard.grad = groups.sums.added(shard.grad, tuple(parts.flatten(0, 1)), parts.dtype)
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
        ctx: Any, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int, grid: str
    ) -> Tensor:
        ones = torch.ones_like(gates)
        out, inner = operators.experts_forward(x, ones, experts, gate_up, down, pad, grid)
        ctx.save_for_backward(x, gates, experts, gate_up, down, inner)
        ctx.how = pad, grid
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

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int, /) -> Tensor:
        """As `expert_mlp`."""
        up, out = (_OnGrid.apply(weight, self.cast) for weight in (gate_up, down))  # type: ignore[no-untyped-call]
        return self.function(x, gates, experts, up, out, pad)


def _swap(x: Tensor, sent: Sequence[int], got: Sequence[int], groups: Groups) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    with groups.clock.transfer():
        dist.all_to_all_single(out, x.contiguous(), list(got), list(sent), group=groups.owners)
    return out


class ExpertParallel:
    """`moe.ExpertFunction` over the experts of a group. All its processes must call it, each with its own rows."""

    def __init__(self, groups: Groups, dtype: torch.dtype, quantised: bool) -> None:
        """dtype: of the served weights. quantised: they and the inputs of the products are in MXFP8."""
        self.groups, self.dtype, self.quantised = groups, dtype, quantised

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int, /) -> Tensor:
        """As `moe.ExpertFunction`; gate_up and down are this process's float32 shards."""
        ups, downs = (_Gathered.apply(shard, self._served, self.groups) for shard in (gate_up, down))  # type: ignore[no-untyped-call]
        k = experts.shape[1]
        flat = experts.reshape(-1)
        owner = flat.div(len(ups[0]), rounding_mode="floor")
        order = owner.argsort(stable=True)
        slots, source = order.argsort(), order // k
        counts = torch.bincount(owner, minlength=self.groups.owners.size())
        single = [1] * self.groups.owners.size()
        coming = _swap(counts, single, single, self.groups)
        sent, got = counts.tolist(), coming.tolist()
        local = _swap((flat - owner * len(ups[0]))[order], sent, got, self.groups)
        ordered = _Sorted.apply(x, source, slots), gates.reshape(-1, 1)[order]  # type: ignore[no-untyped-call]
        rows, weights = (_Exchange.apply(each, sent, got, self.groups) for each in ordered)  # type: ignore[no-untyped-call]
        parts, gated, chosen = torch.split(rows, got), torch.split(weights, got), torch.split(local[:, None], got)
        operands = zip(parts, gated, chosen, ups, downs, strict=True)
        done = torch.cat([self._product(*each, pad) for each in operands])
        back: Tensor = _Exchange.apply(done, got, sent, self.groups)  # type: ignore[no-untyped-call]
        out: Tensor = _Summed.apply(back, slots, gates, source)  # type: ignore[no-untyped-call]
        return out

    def _served(self, masters: Tensor) -> Tensor:
        served = masters.to(self.dtype)
        return operators.rounded(served) if self.quantised else served

    def _product(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int) -> Tensor:
        """The products of the rows of one process. Where there are none, a row of zeros is appended and multiplied: all
        processes take part in the exchanges of the backward pass, and no kernel gets a product without rows."""
        count = len(x)
        if not count:
            x, gates, experts = (torch.cat((each, each.new_zeros(1, each.shape[1]))) for each in (x, gates, experts))
        grid = "mxfp8" if self.quantised else ""
        out: Tensor = _Product.apply(x, gates, experts, gate_up, down, pad, grid)  # type: ignore[no-untyped-call]
        return out[:count]
