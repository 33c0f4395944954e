"""A sum over three nodes of two processes each against that of one process. Here the nodes are threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headrace.training.figures.clock import Clock
from headrace.training.parallel.nodes.sums import Sums
from tests.training.parallel.test_experts import connected, equal

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
            so_far = sums.added(so_far, each[number * PER_NODE : (number + 1) * PER_NODE])
            results.append(so_far)
        return results

    with ThreadPoolExecutor(NODES) as pool:
        for result in pool.map(node, range(NODES)):
            assert equal(result, want)
