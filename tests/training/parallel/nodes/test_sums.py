"""A sum over three nodes of two processes each against that of one process. Here the nodes are threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headrace.training.figures.clock import Clock
from headrace.training.parallel.nodes.sums import Sums
from tests.support.expert_owners import connected
from tests.training.parallel.test_experts import equal

NODES, PER_NODE = 3, 2


def test_a_sum_over_nodes_has_the_order_of_one_process() -> None:
    """Two rounds of micro-batches; in the second only three of the six parts count, and the last node has none."""
    draw = torch.Generator().manual_seed(7)
    parts = [torch.randn(64, generator=draw) * 10**at for at in range(-3, 3)]
    rounds = [parts, [part * 3 for part in reversed(parts)]]
    counts = (6, 3)
    want: list[Tensor] = []
    total: Tensor | None = None
    for each, count in zip(rounds, counts, strict=True):
        for part in each[:count]:
            total = part.clone() if total is None else total + part
        assert total is not None
        want.append(total)
    other = sum(reversed(parts[1:]), parts[0])
    assert not torch.equal(want[0], other), "another order gives other bits"
    store = HashStore()

    def node(number: int) -> list[Tensor]:
        contributors, results = 0, []
        sums = Sums(connected(store, "nodes", number, NODES), lambda: contributors - number * PER_NODE, Clock())
        so_far: Tensor | None = None
        for each, contributors in zip(rounds, counts, strict=True):  # noqa: B007
            so_far = sums.added(so_far, each[number * PER_NODE : (number + 1) * PER_NODE], torch.float32)
            results.append(so_far)
        return results

    with ThreadPoolExecutor(NODES) as pool:
        for result in pool.map(node, range(NODES)):
            assert equal(result, want)


def test_processes_that_share_a_micro_batch_add_its_gradient_in_the_policys_dtype_as_one_process_does() -> None:
    """Two micro-batches of four processes each, then one; the first process of a micro-batch has the first run."""
    draw = torch.Generator().manual_seed(5)
    parts = [torch.randn(512, generator=draw).bfloat16() for _ in range(8)]
    members = [parts[:4], parts[4:]]
    of_one = [((a + b) + (c + d)).float() for a, b, c, d in members]
    in_float32 = torch.stack([part.float() for part in parts[:4]]).sum(0)
    assert not torch.equal(of_one[0], in_float32), "the rounding shows"
    contributors = 8
    sums = Sums(connected(HashStore(), "nodes", 0, 1), lambda: contributors, Clock(), 4)
    wide = [part.float() for part in parts]  # as FSDP sends them
    assert torch.equal(sums.added(None, wide, torch.bfloat16), of_one[0] + of_one[1])
    contributors = 4
    assert torch.equal(sums.added(of_one[1], wide, torch.bfloat16), of_one[1] + of_one[0])
