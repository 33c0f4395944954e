"""Experts that two processes hold against those of one. Here they are threads, connected by gloo."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]

from headrace.kernels import operators
from headrace.policy.moe import ExpertFunction
from headrace.training.figures.clock import Clock
from headrace.training.parallel.experts import ExpertParallel, Groups
from headrace.training.parallel.nodes.sums import Sums
from tests.support import tiny

DIM, INNER = 32, 64
CHOSEN = (
    [[0, 3], [3, 1], [2, 0], [3, 2], [1, 0]],
    [[1, 0], [0, 1], [1, 0]],
    [[1, 0], [0, 1]],
)
"""Experts of three micro-batches: two in the first round, one in the second, where the second half gets no row."""


class Rows(NamedTuple):
    """A micro-batch: inputs [n, D], gates float32 [n, 2], experts [n, 2], and the gradient of the output."""

    x: Tensor
    gates: Tensor
    experts: Tensor
    slope: Tensor

    def through(
        self, function: ExpertFunction, up: Tensor, down: Tensor, pad: int, counts: bool = True
    ) -> list[Tensor]:
        """The output, and the gradients of inputs and gates. counts: whether the output has a gradient."""
        x, gates = self.x.clone().requires_grad_(), self.gates.clone().requires_grad_()
        out = function(x, gates, self.experts, up, down, pad)
        torch.autograd.backward(out, self.slope if counts else torch.zeros_like(self.slope))
        assert x.grad is not None and gates.grad is not None
        return [out.detach(), x.grad, gates.grad]


def connected(store: HashStore, name: str, rank: int, size: int) -> ProcessGroup:
    place = PrefixStore(name, store)
    group = ProcessGroup(place, rank, size)
    gloo = ProcessGroupGloo(place, rank, size, timedelta(seconds=60))  # a failure of one ends the other
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("owners", "dtype", "quantised", "nodes"),
    [
        (2, "bfloat16", True, 1),
        (1, "bfloat16", False, 1),
        (1, "bfloat16", False, 2),
        *(pytest.param(2, *case, 1, marks=pytest.mark.slow) for case in (("bfloat16", False), ("float32", False))),
        *(pytest.param(1, *case, 1, marks=pytest.mark.slow) for case in (("bfloat16", True), ("float32", False))),
    ],
)
def test_experts_of_two_processes_have_the_bits_of_one(owners: int, dtype: str, quantised: bool, nodes: int) -> None:
    """owners: processes that share one copy; 1: each has a copy, which is cut into shards, or whole in two nodes."""
    policy = tiny.config("bfloat16" if dtype == "bfloat16" else "float32", dim=DIM, expert_dim=INNER, experts=4)
    kind, pad, draw = policy.torch_dtype, tiny.numerics(policy).row_pad, torch.Generator().manual_seed(5)
    shapes = (policy.experts, 2 * INNER, DIM), (policy.experts, DIM, INNER)
    masters = [torch.randn(shape, generator=draw) / 6 for shape in shapes]
    micro_batches = [
        Rows(
            torch.randn(len(chosen), DIM, generator=draw).to(kind),
            torch.rand(len(chosen), 2, generator=draw),
            torch.tensor(chosen),
            torch.randn(len(chosen), DIM, generator=draw).to(kind),
        )
        for chosen in CHOSEN
    ]
    want: list[list[Tensor]] = []
    sums: list[Tensor] = []
    for rows in micro_batches:
        served = [operators.rounded(part.to(kind)) if quantised else part.to(kind) for part in masters]
        up, down = (part.clone().requires_grad_() for part in served)
        want.append(rows.through(partial(operators.experts, grid="mxfp8" if quantised else ""), up, down, pad))
        assert up.grad is not None and down.grad is not None
        gradients = [up.grad.float(), down.grad.float()]
        sums = [total + part for total, part in zip(sums, gradients, strict=True)] if sums else gradients

    store = HashStore()

    def process(rank: int) -> tuple[list[list[Tensor]], list[Tensor]]:
        copy, member = divmod(rank, owners)
        contributors, clock, node, place = 2, Clock(), *divmod(rank, 2 // nodes)
        copies = connected(store, f"nodes {place}", node, nodes)
        groups = Groups(
            connected(store, f"owners {copy}", member, owners),
            connected(store, f"copies {member} of node {node}", copy % (2 // owners // nodes), 2 // owners // nodes),
            clock,
            Sums(copies, lambda: contributors - node * (2 // nodes), clock),
        )
        count = policy.experts * nodes // 2
        held = slice(place * count, (place + 1) * count)
        up, down = (torch.nn.Parameter(part[held].clone()) for part in masters)
        function = ExpertParallel(groups, kind, quantised)
        results = [micro_batches[rank].through(function, up, down, pad)]
        contributors = 1
        results.append(micro_batches[2].through(function, up, down, pad, counts=not rank))
        assert up.grad is not None and down.grad is not None
        return results, [up.grad, down.grad]

    with ThreadPoolExecutor(2) as pool:
        (first, gradients), (second, others) = pool.map(process, range(2))
    assert equal(first[0], want[0]) and equal(second[0], want[1]) and equal(first[1], want[2])
    if nodes == 1:
        assert equal([torch.cat(parts) for parts in zip(gradients, others, strict=True)], sums)
    else:
        assert equal(gradients, sums) and equal(others, sums), "both nodes have the whole sum"
