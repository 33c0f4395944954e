"""Sums over the processes of several nodes, in the order of the micro-batches.

The idea: each node holds a whole copy of the state (HSDP: Hybrid Sharded Data Parallel), so a gradient is summed over
the processes of a node and then over nodes. An all-reduce adds in an order of its own. Here a sum goes from node to
node: each adds its own parts to the sum of the nodes before it, and the last one sends the result to all. That is the
order of a single process, so any number of nodes gives its bits, and every copy gets the same ones. Each sum crosses
the network twice, as in an all-reduce.

Trade-off: a node waits for the nodes before it, so the time of a sum grows with the number of nodes.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.training.figures.clock import Clock

_TAG = 0


class Sums:
    """Adds parts of a gradient over nodes. All processes with the same rows must call it, in the same order."""

    def __init__(self, copies: dist.ProcessGroup, contributors: Callable[[], int], clock: Clock) -> None:
        """copies: the processes with the same rows, in the order of nodes. contributors: number of this node's parts,
        from the first on, that count; not positive: none does. clock: gets the time of every exchange."""
        self._copies, self._contributors, self._clock = copies, contributors, clock

    def added(self, total: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        """A new float32 tensor: `total`, the sum so far, and the parts of all nodes.

        parts: of this node, of one shape; in node 0 at least one counts where `total` is None.
        """
        group, node = self._copies, self._copies.rank()
        if node:
            total = torch.empty(parts[0].shape, dtype=torch.float32, device=parts[0].device)
            with self._clock.transfer():
                group.recv([total], node - 1, _TAG).wait()
        for part in parts[: max(0, self._contributors())]:
            total = part.to(torch.float32, copy=True) if total is None else total + part
        assert total is not None
        if group.size() > 1:
            with self._clock.transfer():
                if node < group.size() - 1:
                    group.send([total], node + 1, _TAG).wait()
                dist.broadcast(total, group=group, group_src=group.size() - 1)
        return total
