"""The processes that train one policy together: membership, orders of the first process, shared results.

The idea: every process holds a `ShardedTrainer` and calls the same methods with the same arguments, so all of them make
the same decisions from the same numbers. The first process, the actor's, sends each call to the others before it makes
it. Orders, figures and hashes are sent over gloo; on CUDA devices shards and gradients are sent over NCCL.

A process that dies resets its connections, so every collective that waits for it raises in the others. `GroupError` in
the first process means that its group has ended and that the trainer must be opened again.
"""

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from headrace.messages.training import RankLayout
from headrace.training.figures.clock import Clock
from headrace.training.parallel.context import ContextParallel
from headrace.training.parallel.interface import GroupError
from headrace.training.parallel.nodes import interfaces, values
from headrace.training.parallel.nodes.values import Described

T = TypeVar("T")
PATIENCE = timedelta(days=30)
"""Time limit of the wait for the next order, which may take as long as a batch. A dead process is noticed at once."""
JOIN = timedelta(seconds=60)
"""Time limit of each wait of the rendezvous, which does not notice a dead process; gloo repeats the last wait five
times. All processes have started when it begins."""


def gather(out: Tensor, local: Tensor, group: dist.ProcessGroup, *, later: bool = False) -> Any:
    """The tensors [n, ...] of all processes -> out [processes n, ...]; later: return a handle to wait for."""
    # torch 2.11 has the old name alone, and 2.13 deprecates it.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(out, local, group=group, async_op=later)


def scatter_sum(out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """The sum over all processes of their [processes n, ...] -> out [n, ...]: this process's part of it."""
    # As in `gather`.
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(out, whole, op=op, group=group)


def _all(value: object, kind: Any, size: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """As `Peers.gathered`. group: of `size` processes; None is the whole one."""
    data = torch.frombuffer(bytearray(values.encode(value)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = int(max(lengths))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [
        values.decode(part[: int(length)].numpy().tobytes(), kind) for part, length in zip(parts, lengths, strict=True)
    ]


def _broadcast(data: bytes | None, group: dist.ProcessGroup | None = None) -> bytes:
    """The bytes of the first process of a group, which passes them; the others pass None and wait for them."""
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, group_src=0, group=group)
    content = (
        torch.empty(int(size), dtype=torch.uint8)
        if data is None
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    dist.broadcast(content, group_src=0, group=group)
    return content.numpy().tobytes() if data is None else data


class PeerGroup:
    """Processes with a connection of their own, over gloo: an `interface.Peers`. A thread that does not train needs
    such a connection, because collectives of two threads over one connection would meet each other."""

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        """Call it in every process after `join`. rank, size: in the whole group. nodes: 1, or the number of parts of
        the group, of which this process connects to its own."""
        per_node = size // nodes
        self.rank, self.size = rank % per_node, per_node
        backend = "fake" if dist.get_backend() == "fake" else "gloo"  # fake: where memory is counted
        for node in range(nodes):  # every process takes part in the making of every group
            members = list(range(node * per_node, (node + 1) * per_node))
            made = dist.new_group(members, backend=backend, timeout=JOIN)
            if rank in members:
                self.group = made

    def gathered(self, value: T, kind: type[T]) -> list[T]:
        """As `Peers`."""
        return _all(value, kind, self.size, self.group)

    def shared(self, data: bytes | None = None) -> bytes:
        """The bytes of the first process, which passes them; the others wait for them. RuntimeError when a process has
        ended."""
        return _broadcast(data, self.group)

    def exchange(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send uint8 parts [n] to each rank; sizes: number of bytes from each rank. Returns the received bytes, by
        rank."""
        got = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(got, torch.cat(parts), sizes, [len(part) for part in parts], group=self.group)
        return list(torch.split(got, sizes))


class ProcessGroup:
    """The processes of one trainer: an `interface.DataParallel`."""

    def __init__(
        self,
        device: torch.device,
        expert_ranks: int = 1,
        context_ranks: int = 1,
        nodes: int = 1,
        limit: timedelta = PATIENCE,
    ) -> None:
        """Call it in every process after `join`. expert_ranks: processes that share one copy of the experts;
        context_ranks: processes that share the tokens of a micro-batch; nodes: machines, each with a copy of the
        state in its processes. limit: time limit of a collective, other than the wait for an order."""
        self.device, self.expert_ranks, self.context_ranks, self.nodes = device, expert_ranks, context_ranks, nodes
        self.clock = Clock()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size % nodes:
            raise GroupError(f"{nodes} nodes do not divide {self.size} ranks")
        self.per_node = self.size // nodes
        """Processes of a node."""
        if self.per_node % expert_ranks:
            raise GroupError(f"{expert_ranks} expert ranks do not divide {self.per_node} ranks of a node")
        if self.per_node % context_ranks:
            raise GroupError(f"{context_ranks} context ranks do not divide {self.per_node} ranks of a node")
        self.copy, self.place = divmod(self.rank, self.per_node)
        """Number of this process's node, which is that of its copy of the state, and its number among the processes of
        the node: processes with one number hold the same rows."""
        self.node = PeerGroup(self.rank, self.size, nodes)
        """The processes of this node."""
        self.aside, self.ahead = PeerGroup(self.rank, self.size, nodes), PeerGroup(self.rank, self.size)
        """Connections of the thread that copies versions, to the processes of the node, and of the thread that sends
        or receives records, to all."""
        self.orders = PeerGroup(self.rank, self.size)
        whole = init_device_mesh(device.type, (nodes, self.per_node), mesh_dim_names=("nodes", "shard"))
        self.mesh: DeviceMesh = whole if nodes > 1 else whole["shard"]
        """Of FSDP2: with several nodes shards are copied along the first dimension (HSDP)."""
        self.copies: dist.ProcessGroup = whole.get_group("nodes")
        """The processes that hold the same rows, in the order of nodes."""
        grid = (nodes, self.per_node // expert_ranks, expert_ranks)
        self.grid: DeviceMesh = init_device_mesh(device.type, grid, mesh_dim_names=("nodes", "copies", "experts"))
        """Experts are owned along the last dimension and cut into shards along the second."""
        self.context: ContextParallel | None = None
        """The processes that compute a micro-batch together with this one: neighbours in the order of ranks."""
        if context_ranks > 1:
            rows = (self.size // context_ranks, context_ranks)
            mesh = init_device_mesh(device.type, rows, mesh_dim_names=("micro_batches", "context"))
            self.context = ContextParallel(mesh.get_group("context"), self.clock)
        groups = [None, self.node.group, self.aside.group, *whole.get_all_groups(), *self.grid.get_all_groups()]
        for member in groups + (mesh.get_all_groups() if context_ranks > 1 else []):
            _set_pg_timeout(limit, member)
        for waiting in (self.ahead, self.orders):
            _set_pg_timeout(PATIENCE, waiting.group)

    @property
    def layout(self) -> RankLayout:
        """The layout as a manifest names it."""
        told: dict[str, str] = {}
        if self.device.type == "cuda":
            told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            told |= {name: os.environ.get(name.upper(), "") for name in ("nccl_algo", "nccl_proto")}
        return RankLayout(
            ranks=self.size,
            nodes=self.nodes,
            expert_ranks=self.expert_ranks,
            context_ranks=self.context_ranks,
            backend="nccl" if told else "gloo",
            torch=str(torch.__version__),
            **told,
        )

    def agree(self, digest: str, what: str) -> str:
        """The hash of `what` of this node's copy. All processes must call this. GroupError when nodes have different
        ones."""
        every = self.gathered(digest, str)[:: self.per_node] if self.nodes > 1 else []
        for node, other in enumerate(every):
            if other != every[0]:
                raise GroupError(
                    f"the {what} of node {node} has hash {other}, that of node 0 {every[0]}: the machines round "
                    "otherwise, or one of them is damaged"
                )
        return digest

    def copied(self, work: Callable[[], tuple[T, dict[str, Tensor]]], kind: type[T]) -> tuple[T, dict[str, Tensor]]:
        """A value of this type and tensors that node 0 makes by `work`, in every node: from the process with the same
        rows. All processes must call this. The other nodes get their tensors on the CPU. GroupError as `gathered`."""
        if self.nodes == 1:
            return work()
        told: bytes | None = None
        tensors: dict[str, Tensor] = {}
        if self.copy == 0:
            value, tensors = work()
            told = values.encode((value, {name: Described.of(tensor) for name, tensor in tensors.items()}))
        described: dict[str, Described]
        pair: Any = tuple[kind, dict[str, Described]]  # type: ignore[valid-type]
        value, described = values.decode(_broadcast(told, self.copies), pair)
        for name, about in described.items():
            whole = tensors[name] if self.copy == 0 else about.empty()
            raw = whole.cpu().contiguous().reshape(-1).view(torch.uint8)
            if len(raw):
                dist.broadcast(raw, group=self.copies, group_src=0)
            tensors.setdefault(name, whole)
        return value, tensors

    def each(self, count: int, work: Callable[[int, bool], T], kind: type[T]) -> list[T]:
        """As `DataParallel`: micro-batches are assigned round-robin, and every process gets all results.

        One round holds consecutive micro-batches. They are in the order of their predicted operations, so a round's
        take about equal time, and a process without one in the last round takes the last. The context ranks of a
        micro-batch have the same result.
        """
        mine: dict[int, T] = {}
        together = self.size // self.context_ranks
        number, member = divmod(self.rank, self.context_ranks)
        for first in range(0, count, together):
            at = first + number
            if at < count:
                result = work(at, True)
                if not member:
                    mine[at] = result
            else:  # a collective waits for all processes
                work(count - 1, False)
        by_number: Any = dict[int, kind]  # type: ignore[valid-type]
        results = {at: value for part in self.gathered(mine, by_number) for at, value in part.items()}
        return [results[at] for at in range(count)]

    def gathered(self, value: T, kind: type[T]) -> list[T]:
        """As `Peers`."""
        with self.clock.transfer():
            return _all(value, kind, self.size)

    def tell(self, order: msgspec.Struct) -> None:
        """From the first process: send an order to the others."""
        with self.clock.transfer():
            _broadcast(values.encode(order), self.orders.group)

    def hear(self, kind: Any) -> Any:
        """In every other process: wait for an order, of a union of these types. GroupError for other bytes."""
        return values.decode(_broadcast(None, self.orders.group), kind)


def join(device: torch.device, rank: int, size: int, store: PrefixStore, limit: timedelta = JOIN) -> None:
    """Join the group; returns when all `size` processes have joined. store: the group's keys in a TCPStore, whose
    interface its connections use. RuntimeError when one does not come within `limit`; GroupError when this process is
    in a group already."""
    if dist.is_initialized():
        raise GroupError(
            "this process is in a trainer's group already; expected at most one trainer with ranks per process"
        )
    backend = "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    interfaces.pin(store.underlying_store.host)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except Exception:
        # Torch names groups by a number, which it sets back only with a group that it destroys. All processes need one
        # number: without this, one whose join failed would never meet new processes.
        distributed_c10d._world.group_count = 0
        raise


_CONNECTION = ("gloo", "NCCL", "ncclComm")
"""Words in the texts of torch's errors about a connection of the group, which are RuntimeErrors."""


def broken(error: BaseException) -> bool:
    """Whether an exception, or what it comes from, says that a connection of the group is broken: another process has
    ended, or does not answer."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, dist.DistError | ConnectionError) or any(word in str(at) for word in _CONNECTION):
            return True
        at = at.__cause__ or at.__context__
    return False


def timed_out(error: BaseException) -> bool:
    """Whether a collective waited for longer than its limit."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def abort() -> None:
    """From any thread: end the collectives of this process over NCCL, which may wait on the device for a process that
    has ended. Those over gloo end with their connections."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return
    for member in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError, AttributeError):  # no NCCL in it, or nothing to abort
            member._get_backend(torch.device("cuda")).abort()


def leave() -> None:
    """Leave the group. The caller must have freed its sharded models.

    Gloo's threads free tensors late; a tensor that is still alive when the interpreter ends aborts the process (PyTorch
    #179291, #190489).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
