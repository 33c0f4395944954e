"""The processes that train one policy together: membership, the orders of the first one to the others, shared results.

The idea: every process holds a `ShardedTrainer` and calls the same methods with the same arguments, so all of them take
the same decisions from the same numbers. The first one, the actor's, sends each call to the others before it makes it.
Orders, figures and hashes travel over gloo; on CUDA devices shards and gradients travel over NCCL.

A process that dies resets its connections, so every collective that waits for it raises in the others. `GroupError` in
the first process means that its group has ended and that the trainer must be opened again.
"""

import gc
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.training.parallel.interface import GroupError

T = TypeVar("T")
PATIENCE = timedelta(days=30)
"""Time limit of a collective: a process waits for the next order as long as a batch takes. A dead process is noticed at
once."""


class ProcessGroup:
    """The processes of one trainer: a `step.DataParallel`."""

    def __init__(self, device: torch.device, expert_ranks: int = 1) -> None:
        """Call it in every process after `join`. expert_ranks: processes that share one copy of the experts."""
        self.device, self.expert_ranks = device, expert_ranks
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size % expert_ranks:
            raise GroupError(f"{expert_ranks} expert ranks do not divide {self.size} ranks")
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
        grid = (self.size // expert_ranks, expert_ranks)
        self.grid: DeviceMesh = init_device_mesh(device.type, grid, mesh_dim_names=("copies", "experts"))
        """Experts are owned along the second dimension and cut into shards along the first."""
        self.contributors = self.size
        """Number of processes, from the first on, that add to the gradient of the current round."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `DataParallel`: micro-batches are assigned round-robin, and every process gets all results.

        Round-robin dealing puts neighbours into one round, so gradients are added in the order of a single process.
        """
        mine: dict[int, Any] = {}
        for first in range(0, count, self.size):
            at = first + self.rank
            self.contributors = min(self.size, count - first)
            if at < count:
                mine[at] = _on_cpu(work(at, True))
            else:  # a collective waits for all processes
                work(0, False)
        found = {at: value for part in self.gathered(mine) for at, value in part.items()}
        return [found[at] for at in range(count)]

    def gathered(self, value: T) -> list[T]:
        """One value of every process, in the order of ranks."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def tell(self, order: object) -> None:
        """From the first process: send an order to the others."""
        data = torch.frombuffer(bytearray(pickle.dumps(order)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0)
        dist.broadcast(data, src=0)

    def hear(self) -> Any:
        """In every other process: wait for an order."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return pickle.loads(data.numpy().tobytes())

    def exchange(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """parts: uint8 [n] for each rank; sizes: bytes that each rank has for this one. The received bytes, by rank."""
        got = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(got, torch.cat(parts), sizes, [len(part) for part in parts])
        return list(torch.split(got, sizes))


def _on_cpu(value: Any) -> Any:
    """A result with its tensors on the CPU: another process may not have this one's device."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_on_cpu, value))
    return value


def join(device: torch.device, rank: int, size: int, store: Any = None) -> None:
    """Become a process of the group, all together. store: the first process's own; the others take torchrun's
    environment variables."""
    if dist.is_initialized():
        raise GroupError("this process trains in a group already; run one trainer with ranks in a process")
    backend = "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if store is None:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        shared = PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=PATIENCE)


def leave() -> None:
    """Leave the group, with no sharded model in any name.

    Gloo's threads let go of tensors late; one that is left until the interpreter ends aborts the process (PyTorch
    #179291, #190489).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
