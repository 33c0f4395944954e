"""Sums over the processes of several nodes, in the order of the micro-batches.

The idea: each node holds a whole copy of the state (HSDP: Hybrid Sharded Data Parallel), so a gradient is summed over
the processes of a node and then over nodes. An all-reduce adds in an order of its own. Here a sum goes from node to
node: each adds its own parts to the sum of the nodes before it, and the last one sends the result to all. That is the
order of a single process, so any number of nodes gives its bits, and every copy gets the same ones. Each sum crosses
the network twice, as in an all-reduce.

Processes that share the tokens of a micro-batch first add up its gradient, in the pairs of `policy.token_runs`, in the
dtype in which a single process has it.

Trade-off: a node waits for the nodes before it, so the time of a sum grows with the number of nodes.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.policy.token_runs.weights import pairwise_sum
from headrace.training.figures.clock import Clock

_TAG = 0


class Sums:
    """Adds parts of a gradient over nodes. All processes with the same rows must call it, in the same order."""

    def __init__(
        self, copies: dist.ProcessGroup, contributors: Callable[[], int], clock: Clock, together: int = 1
    ) -> None:
        """copies: the processes with the same rows, in the order of nodes. contributors: number of this node's parts,
        from the first on, that count; not positive: none does. clock: gets the time of every exchange. together:
        processes that share a micro-batch, neighbours in the order of parts."""
        self._copies, self._contributors, self._clock, self._together = copies, contributors, clock, together

    def added(self, total: Tensor | None, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A new float32 tensor: `total`, the sum so far, and the parts of all nodes.

        parts: of this node, of one shape; in node 0 at least one counts where `total` is None. dtype: of the policy,
        in which a process computes its parts.
        """
        group, node = self._copies, self._copies.rank()
        if node:
            total = torch.empty(parts[0].shape, dtype=torch.float32, device=parts[0].device)
            with self._clock.transfer():
                group.recv([total], node - 1, _TAG).wait()
        counted = parts[: max(0, self._contributors())]
        for first in range(0, len(counted), self._together):
            members = counted[first : first + self._together]
            part = pairwise_sum([each.to(dtype) for each in members]) if len(members) > 1 else members[0]
            total = part.to(torch.float32, copy=True) if total is None else total + part
        assert total is not None
        if group.size() > 1:
            with self._clock.transfer():
                if node < group.size() - 1:
                    group.send([total], node + 1, _TAG).wait()
                dist.broadcast(total, group=group, group_src=group.size() - 1)
        return total
