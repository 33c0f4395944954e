"""Weights with a gradient for each run of tokens, and the order in which these gradients are added.

Idea: the gradient of a weight is a sum over tokens, and its bits depend on the order of that sum. A micro-batch is cut
into a fixed number of runs. The rows of a run are multiplied by themselves, whichever process has them, and the runs'
gradients are added in pairs of neighbours, then the sums in pairs, and so on: the pairwise sum of numerical analysis
(Higham, SIAM J. Sci. Comput. 14, 1993). A process with consecutive runs computes a subtree, several processes add their
results in the same tree, so any number of processes gives the same bits.

Every sum is rounded to the dtype of the weights, because a process that holds two runs has to hand on their sum in it.

Layout: `replicas` makes one module per run that shares everything with the original but its parameters: these are views
whose gradients `_Views` collects. Torch's DataParallel makes its replicas in the same way.

Trade-off: a process with n runs multiplies n smaller matrices, and holds n gradients of a layer until they are added.
With one run, or with a process for each, nothing is split and nothing is held.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def pairwise_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors of one shape, in pairs of neighbours: of five (((0 + 1) + (2 + 3)) + 4)."""
    level = list(parts)
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class _Views(torch.autograd.Function):
    """`count` views of a weight; backward adds their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return pairwise_sum(gradients), None


def replicas(module: Module, count: int) -> list[Module]:
    """The module once for each run. With one run it is the module itself.

    Call methods of a replica, not the replica: it has the hooks of the module, which are for the module.
    """
    if count < 2:
        return [module]
    views = {name: _Views.apply(each, count) for name, each in module.named_parameters(recurse=False)}  # type: ignore[no-untyped-call]
    out = []
    for run in range(count):
        replica = object.__new__(type(module))
        replica.__dict__.update(module.__dict__)
        replica.__dict__["_parameters"] = module._parameters | {name: view[run] for name, view in views.items()}
        out.append(replica)
    return out


def split(x: Tensor | None, runs: Sequence[int]) -> Sequence[Any]:
    """The rows of each run; of one run x itself, and of None one None per run."""
    if x is None:
        return [None] * max(1, len(runs))
    return [x] if len(runs) < 2 else torch.split(x, list(runs))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `split`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def borders(tokens: int, runs: int) -> list[int]:
    """The first token of each run, and `tokens`: the lengths of runs differ by at most one."""
    return [tokens * run // runs for run in range(runs + 1)]


def lengths_between(cuts: Sequence[int]) -> list[int]:
    """The differences of neighbouring borders."""
    return [end - start for start, end in itertools.pairwise(cuts)]
