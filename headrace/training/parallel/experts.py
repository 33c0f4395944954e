"""Experts in different processes: rows are sent to them and back (GShard, arXiv 2006.16668).

Idea: each process of an expert group owns an equal run of experts. A layer's rows are sorted by owner, sent, multiplied
there by the function that a single process uses, and sent back; the gates and the sum over slots are computed in the
process that sent the rows. Sending changes only the order of rows, and a row's bits do not depend on the rows beside
it: in exact mode the forward pass gives the same bits as on one process.

With several expert groups a run of experts is cut once more: each process stores float32 masters of its part, the parts
are cast and gathered from the other groups before they are multiplied, and gradients are added in the order of ranks.

Trade-off: an expert's weight gradient is one product over the rows of all processes instead of a sum over
micro-batches: the same value up to rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels import operators
from headrace.policy.moe import ExpertFunction
from headrace.training.figures.clock import Clock


class Groups(NamedTuple):
    """The processes that an `ExpertParallel` exchanges with."""

    owners: dist.ProcessGroup
    """Those that together own one copy of the experts."""
    copies: dist.ProcessGroup
    """Those that share the same run of experts."""
    clock: Clock
    """Gets the time of every exchange."""


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
    """Gathers the shards [e, ...] of one run of experts in `dtype`; gradients are summed in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype, groups: Groups) -> Tensor:
        ctx.groups, group = groups, groups.copies
        local = shard.detach().to(dtype).contiguous()
        if group.size() == 1:
            return local.clone() if local is shard else local
        out = local.new_empty(group.size() * len(local), *local.shape[1:])
        with groups.clock.transfer():
            dist.all_gather_single(out, local, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wide = grad.float().contiguous()
        count = ctx.groups.copies.size()
        if count == 1:
            return wide, None, None
        got = torch.empty_like(wide)
        with ctx.groups.clock.transfer():
            dist.all_to_all_single(got, wide, group=ctx.groups.copies)
        total, *others = got.view(count, -1, *wide.shape[1:])
        for other in others:
            total = total + other
        return total, None, None


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

    def __init__(self, groups: Groups, function: ExpertFunction, dtype: torch.dtype) -> None:
        self.groups, self.function, self.dtype = groups, function, dtype

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int, /) -> Tensor:
        """As `moe.ExpertFunction`; gate_up and down are this process's float32 shards."""
        own_up: Tensor = _Gathered.apply(gate_up, self.dtype, self.groups)  # type: ignore[no-untyped-call]
        own_down: Tensor = _Gathered.apply(down, self.dtype, self.groups)  # type: ignore[no-untyped-call]
        k = experts.shape[1]
        flat = experts.reshape(-1)
        owner = flat.div(own_up.shape[0], rounding_mode="floor")
        order = owner.argsort(stable=True)
        slots = order.argsort()
        counts = torch.bincount(owner, minlength=self.groups.owners.size())
        single = [1] * self.groups.owners.size()
        coming = _swap(counts, single, single, self.groups)
        sent, got = counts.tolist(), coming.tolist()
        arrived: Tensor = _Exchange.apply(operators.permute(x, order // k, slots), sent, got, self.groups)  # type: ignore[no-untyped-call]
        local = _swap((flat - owner * own_up.shape[0])[order], sent, got, self.groups)
        gate = torch.ones(len(arrived), 1, device=x.device)
        done = self.function(arrived, gate, local[:, None], own_up, own_down, pad)
        back: Tensor = _Exchange.apply(done, got, sent, self.groups)  # type: ignore[no-untyped-call]
        return operators.unpermute(back, slots, gates)
