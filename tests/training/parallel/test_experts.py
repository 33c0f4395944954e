"""Experts that two processes hold against those of one. Here they are threads, connected by gloo."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headrace.kernels import operators
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.moe import ExpertFunction
from headrace.training.batches.micro_batch import MicroBatch
from headrace.training.figures.clock import Clock
from headrace.training.parallel.experts import ExpertParallel, Groups
from tests.support import tiny
from tests.support.expert_owners import connected, own
from tests.training.parallel.test_context import SHAPES, assert_sums, computed, segment

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
        self, function: ExpertFunction, up: Tensor, down: Tensor, exact: bool, counts: bool = True
    ) -> list[Tensor]:
        """The output, and the gradients of inputs and gates. counts: whether the output has a gradient."""
        x, gates = self.x.clone().requires_grad_(), self.gates.clone().requires_grad_()
        out = function(x, gates, self.experts, up, down, exact)
        torch.autograd.backward(out, self.slope if counts else torch.zeros_like(self.slope))
        assert x.grad is not None and gates.grad is not None
        return [out.detach(), x.grad, gates.grad]


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def owned(function: ExpertParallel) -> ExpertFunction:
    """Owned experts for one layer."""

    def call(x: Tensor, gates: Tensor, experts: Tensor, up: Tensor, down: Tensor, exact: bool, /) -> Tensor:
        told = function.counts(experts[:, None])
        assert told is not None
        return function(x, gates, experts, up, down, True, told[0])

    return call


@pytest.mark.parametrize(
    ("owners", "dtype", "quantised", "nodes"),
    [
        (2, "bfloat16", True, 1),
        (2, "float32", False, 1),
        (1, "float32", False, 1),
        (1, "bfloat16", False, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, "bfloat16", False, 1), (1, "bfloat16", True, 1))
        ),
    ],
)
def test_experts_of_two_processes_have_the_bits_of_one_and_the_sum_of_its_gradients(
    owners: int, dtype: str, quantised: bool, nodes: int
) -> None:
    """owners: processes that share one copy; 1: each has a copy, which is cut into shards, or whole in two nodes."""
    policy = tiny.config("bfloat16" if dtype == "bfloat16" else "float32", dim=DIM, expert_dim=INNER, experts=4)
    kind, draw = policy.torch_dtype, torch.Generator().manual_seed(5)
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
        want.append(rows.through(partial(operators.experts, grid="mxfp8" if quantised else ""), up, down, True))
        assert up.grad is not None and down.grad is not None
        gradients = [up.grad.double(), down.grad.double()]
        sums = [total + part for total, part in zip(sums, gradients, strict=True)] if sums else gradients

    store = HashStore()

    def process(rank: int) -> tuple[list[list[Tensor]], list[Tensor]]:
        copy, member = divmod(rank, owners)
        clock, (node, place) = Clock(), divmod(rank, 2 // nodes)
        groups = Groups(
            connected(store, f"owners {copy}", member, owners),
            connected(store, f"copies {member} of node {node}", copy % (2 // owners // nodes), 2 // owners // nodes),
            connected(store, f"nodes {place}", node, nodes),
            clock,
        )
        count = policy.experts * nodes // 2
        held = slice(place * count, (place + 1) * count)
        up, down = (torch.nn.Parameter(part[held].clone()) for part in masters)
        function = owned(ExpertParallel(groups, policy.experts // owners, kind, quantised))
        results = [micro_batches[rank].through(function, up, down, True)]
        results.append(micro_batches[2].through(function, up, down, True, counts=not rank))
        assert up.grad is not None and down.grad is not None
        return results, [up.grad, down.grad]

    with ThreadPoolExecutor(2) as pool:
        (first, gradients), (second, others) = pool.map(process, range(2))
    assert equal(first[0], want[0]) and equal(second[0], want[1]) and equal(first[1], want[2])
    if nodes == 2:
        assert equal(gradients, others), "both nodes have the whole sum"
        got = gradients
    else:
        got = [torch.cat(parts) for parts in zip(gradients, others, strict=True)]
    for whole, total in zip(got, sums, strict=True):
        assert whole.dtype == torch.float32
        assert (whole.double() - total).norm() / total.norm() < (1e-6 if dtype == "float32" else 1e-2)


def packed(policy: PolicyConfig, lengths: Sequence[int], seed: int = 3) -> MicroBatch:
    """A micro-batch with a record of every position."""
    draw = torch.Generator().manual_seed(seed)
    return MicroBatch.of([segment(policy, draw, length) for length in lengths], torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("mixture, bfloat16", (70, 131, 5, 1)),
        ("mixture", (3,)),  # experts without rows
        ("mixture", (1,)),  # fewer tokens than processes, so one has no record
        *(pytest.param(name, (70, 131, 5, 1), marks=pytest.mark.slow) for name in ("mixture, MXFP8", "latent")),
    ],
)
def test_owners_that_share_tokens_have_the_bits_of_one_process_and_the_sum_of_its_gradients(
    name: str, lengths: Sequence[int]
) -> None:
    policy = SHAPES[name]
    numerics, micro, store = tiny.numerics(policy), packed(policy, lengths), HashStore()
    whole, parts = Model(policy, numerics, seed=1), [Model(policy, numerics, seed=1) for _ in range(2)]

    def process(rank: int) -> tuple[Tensor, Tensor]:
        parts[rank].recompute = True
        own(parts[rank], store, rank, together=True)
        return computed(parts[rank], micro)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(process, range(2)))
    want = computed(whole, micro)
    assert all(equal(result, want) for result in results)
    assert_sums(policy, whole, parts)


class Exchanges:
    """Counts the exchanges of numbers of rows, by thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: dict[int, int] = {}
        real = dist.all_to_all_single

        def counting(out: Tensor, x: Tensor, *rest: Any, **options: Any) -> Any:
            if x.dtype == torch.int64 and x.dim() == 2:  # [owners, ...]; ids of experts have one dimension
                self.counts[threading.get_ident()] = self.here() + 1
            return real(out, x, *rest, **options)

        patch.setattr(dist, "all_to_all_single", counting)

    def here(self) -> int:
        """Of this thread."""
        return self.counts.get(threading.get_ident(), 0)


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("case", ["recorded", "one position without a record", "plausible"])
def test_recorded_routes_give_the_counts_of_all_layers_in_one_exchange(
    case: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes of two ranks, each with a micro-batch of its own, activations computed again."""
    policy = msgspec.structs.replace(SHAPES["mixture"], layers=layers)
    numerics, store, exchanges = tiny.numerics(policy), HashStore(), Exchanges(monkeypatch)
    micros = [packed(policy, (20, 9), 3), packed(policy, (13, 4), 4)]
    if case == "one position without a record":
        assert micros[1].routes is not None
        micros[1].routes[7, 1] = -1
    models = [Model(policy, numerics, seed=1) for _ in range(3)]
    for model in models:
        model.plausible = 0.9 if case == "plausible" else 0.0
        model.recompute = True

    def process(rank: int) -> tuple[Tensor, int]:
        own(models[rank], store, rank)
        computed(models[rank], micros[rank])
        return computed(models[rank], micros[rank])[0], exchanges.here()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(process, range(2)))
    a_pass = {"recorded": 1, "one position without a record": 1 + layers, "plausible": layers}[case]
    assert [count for _, count in results] == [2 * a_pass] * 2, "none where activations are computed again"
    for (logp, _), micro in zip(results, micros, strict=True):
        assert torch.equal(logp, computed(models[2], micro)[0])
