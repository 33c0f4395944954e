"""The processes that train one policy together: membership, orders of the first process, shared results.

The idea: every process holds a `ShardedTrainer` and calls the same methods with the same arguments, so all of them make
the same decisions from the same numbers. The first process, the actor's, sends each call to the others before it makes
it. Orders, figures and hashes are sent over gloo; on CUDA devices shards and gradients are sent over NCCL.

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
from torch.distributed.distributed_c10d import _set_pg_timeout

from headrace.training.figures.clock import Clock
from headrace.training.parallel.context import ContextParallel
from headrace.training.parallel.interface import GroupError

T = TypeVar("T")
PATIENCE = timedelta(days=30)
"""Time limit of a collective: a process may wait for the next order for as long as a batch takes. A dead process is
noticed at once."""
JOIN = timedelta(seconds=60)
"""Time limit of each wait of the rendezvous, which does not notice a dead process; gloo repeats the last wait five
times. All processes have started when it begins."""


class Aside:
    """A second connection between the processes of a group, for one thread that does not train: collectives of two
    threads over one connection would meet each other. An `interface.Peers`."""

    def __init__(self, rank: int, size: int) -> None:
        """Call it in every process after `join`."""
        self.rank, self.size = rank, size
        self.group = dist.new_group(backend="gloo", timeout=JOIN)

    def gathered(self, value: T) -> list[T]:
        """One value of every process, in the order of ranks."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def shared(self, data: bytes | None = None) -> bytes:
        """The bytes of the first process, which passes them; the others wait for them. RuntimeError when a process has
        ended."""
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, src=0, group=self.group)
        content = (
            torch.empty(int(size), dtype=torch.uint8)
            if data is None
            else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        )
        dist.broadcast(content, src=0, group=self.group)
        return content.numpy().tobytes() if data is None else data


class ProcessGroup:
    """The processes of one trainer: an `interface.DataParallel`."""

    def __init__(self, device: torch.device, expert_ranks: int = 1, context_ranks: int = 1) -> None:
        """Call it in every process after `join`. expert_ranks: processes that share one copy of the experts;
        context_ranks: processes that share the tokens of a micro-batch."""
        self.device, self.expert_ranks, self.context_ranks = device, expert_ranks, context_ranks
        self.clock = Clock()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size % expert_ranks:
            raise GroupError(f"{expert_ranks} expert ranks do not divide {self.size} ranks")
        if self.size % context_ranks:
            raise GroupError(f"{context_ranks} context ranks do not divide {self.size} ranks")
        self.aside, self.ahead = Aside(self.rank, self.size), Aside(self.rank, self.size)
        """Connections of the thread that copies versions, and of the thread that sends or receives records."""
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
        grid = (self.size // expert_ranks, expert_ranks)
        self.grid: DeviceMesh = init_device_mesh(device.type, grid, mesh_dim_names=("copies", "experts"))
        """Experts are owned along the second dimension and cut into shards along the first."""
        self.context: ContextParallel | None = None
        """The processes that compute a micro-batch together with this one: neighbours in the order of ranks."""
        if context_ranks > 1:
            rows = (self.size // context_ranks, context_ranks)
            mesh = init_device_mesh(device.type, rows, mesh_dim_names=("micro_batches", "context"))
            self.context = ContextParallel(mesh.get_group("context"), self.clock)
        groups = [None, self.aside.group, self.ahead.group, *self.mesh.get_all_groups(), *self.grid.get_all_groups()]
        for member in groups + (mesh.get_all_groups() if context_ranks > 1 else []):
            _set_pg_timeout(PATIENCE, member)
        self.contributors = self.size
        """Number of processes, from the first on, that add to the gradient of the current round."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `DataParallel`: micro-batches are assigned round-robin, and every process gets all results.

        One round holds consecutive micro-batches, so gradients are added in the order of a single process. The context
        ranks of a micro-batch have the same result.
        """
        mine: dict[int, Any] = {}
        together = self.size // self.context_ranks
        number, member = divmod(self.rank, self.context_ranks)
        for first in range(0, count, together):
            at = first + number
            self.contributors = min(together, count - first) * self.context_ranks
            if at < count:
                result = work(at, True)
                if not member:
                    mine[at] = _on_cpu(result)
            else:  # a collective waits for all processes
                work(0, False)
        results = {at: value for part in self.gathered(mine) for at, value in part.items()}
        return [results[at] for at in range(count)]

    def gathered(self, value: T) -> list[T]:
        """One value of every process, in the order of ranks."""
        out: list[Any] = [None] * self.size
        with self.clock.transfer():
            dist.all_gather_object(out, value)
        return out

    def tell(self, order: object) -> None:
        """From the first process: send an order to the others."""
        data = torch.frombuffer(bytearray(pickle.dumps(order)), dtype=torch.uint8)
        with self.clock.transfer():
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
        """Send uint8 parts [n] to each rank; sizes: number of bytes from each rank. Returns the received bytes, by
        rank."""
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
    """Join the group; returns when all `size` processes have joined. store: in the first process, its own store; the
    others pass None and use torchrun's environment variables. RuntimeError when one does not come within `JOIN`;
    GroupError when this process is in a group already."""
    if dist.is_initialized():
        raise GroupError(
            "this process is in a trainer's group already; expected at most one trainer with ranks per process"
        )
    backend = "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if store is None:
        dist.init_process_group(backend, timeout=JOIN)
    else:
        shared = PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=JOIN)


def leave() -> None:
    """Leave the group. The caller must have freed its sharded models.

    Gloo's threads free tensors late; a tensor that is still alive when the interpreter ends aborts the process (PyTorch
    #179291, #190489).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
