"""Experts that live on different processes: rows travel to them and back (GShard, arXiv 2006.16668).

Idea: each process owns an equal run of experts. A layer's rows are sorted by owner, sent, multiplied there by the very
function that a single process uses, and sent back; gates and the sum over slots stay at home. Sending changes the order
of rows and nothing else, and a row's bits do not depend on its company: in exact mode the forward pass has the bits of
one process.

Trade-off: an expert's weight gradient is one product over the rows of all processes instead of a sum over
micro-batches: the same number, rounded otherwise.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.policy.moe import ExpertFunction


class _Exchange(torch.autograd.Function):
    """Rows to whom they belong; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.ways = sent, got, group
        return _swap(x, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got, group = ctx.ways
        return _swap(grad, got, sent, group), None, None, None


def _swap(x: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(got), list(sent), group=group)
    return out


class ExpertParallel:
    """`moe.ExpertFunction` over the experts of a group. All its processes must call it, each with its own rows."""

    def __init__(self, group: dist.ProcessGroup, function: ExpertFunction) -> None:
        self.group, self.function = group, function

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, pad: int, /) -> Tensor:
        """As `expert_mlp`; gate_up and down are sharded by expert over the group."""
        assert isinstance(gate_up, DTensor) and isinstance(down, DTensor)
        own_up, own_down = gate_up.to_local(), down.to_local()
        tokens, k = experts.shape
        flat = experts.reshape(-1)
        owner = flat.div(own_up.shape[0], rounding_mode="floor")
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.group.size())
        coming = _swap(counts, [1] * self.group.size(), [1] * self.group.size(), self.group)
        sent, got = counts.tolist(), coming.tolist()
        arrived: Tensor = _Exchange.apply(x.index_select(0, order // k), sent, got, self.group)  # type: ignore[no-untyped-call]
        local = _swap((flat - owner * own_up.shape[0])[order], sent, got, self.group)
        one = torch.ones(len(arrived), 1, device=x.device)
        done = self.function(arrived, one, local[:, None], own_up, own_down, pad)
        back: Tensor = _Exchange.apply(done, got, sent, self.group)  # type: ignore[no-untyped-call]
        slots = back.index_select(0, order.argsort()).view(tokens, k, -1).float() * gates[..., None]
        out = slots[:, 0]
        for slot in range(1, k):
            out = out + slots[:, slot]
        return out.to(x.dtype)
