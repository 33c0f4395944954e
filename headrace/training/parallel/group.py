"""The processes that train one policy together: membership, orders of the first process, shared results.

The idea: every process holds a `ShardedTrainer` and calls the same methods with the same arguments, so all of them make
the same decisions from the same numbers. The first process, the actor's, sends each call to the others before it makes
it. Orders, figures and hashes are sent over gloo; on CUDA devices shards and gradients are sent over NCCL.

A process that dies resets its connections, so every collective that waits for it raises in the others. `GroupError` in
the first process means that its group has ended and that the trainer must be opened again.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from headrace.config import Mesh
from headrace.messages.training import RankLayout
from headrace.messages.weights import TensorInfo
from headrace.training.figures.clock import Clock
from headrace.training.parallel import far
from headrace.training.parallel.context import ContextParallel
from headrace.training.parallel.interface import GroupError, Writes
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

    def __init__(self, rank: int, size: int, parts: int = 1, node_ranks: int = 0) -> None:
        """Call it in every process after `join`. rank, size: in the whole group. parts: of the group; this process
        connects to its own. node_ranks: processes of a machine; 0: all are on one."""
        each = size // parts
        self.rank, self.size = rank % each, each
        self.near = min(each, node_ranks or each)
        backend = "fake" if dist.get_backend() == "fake" else "gloo"  # fake: where memory is counted
        for part in range(parts):  # every process takes part in the making of every group
            members = list(range(part * each, (part + 1) * each))
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

    def writing(
        self, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]
    ) -> AbstractContextManager[Writes]:
        """As `Peers`."""
        return far.writing(self, path, described, about)

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """A message to one process, which waits for it. RuntimeError when it has ended."""
        data = torch.frombuffer(bytearray(values.encode(message)), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), group=self.group, group_dst=rank)
        dist.send(data, group=self.group, group_dst=rank)

    def receive(self, rank: int, kind: Any) -> Any:
        """Wait for a message of one process, of a union of these types. RuntimeError, GroupError as `gathered`."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=self.group, group_src=rank)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, group=self.group, group_src=rank)
        return values.decode(data.numpy().tobytes(), kind)

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
        mesh: Mesh,
        node_ranks: int = 0,
        limit: timedelta = PATIENCE,
    ) -> None:
        """Call it in every process after `join`. node_ranks: processes of a machine; 0: all are on one. limit: time
        limit of a collective, other than the wait for an order. GroupError for a mesh of another size."""
        self.device, self.dims = device, mesh
        self.clock = Clock()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != mesh.replicate * mesh.shard or mesh.shard % mesh.expert or mesh.shard % mesh.context:
            raise GroupError(f"{mesh} is no mesh of {self.size} processes")
        self.copy, self.place = divmod(self.rank, mesh.shard)
        """Number of this process's copy of the state, and its number among the processes of the copy: processes with
        one number hold the same rows."""
        self.holders = PeerGroup(self.rank, self.size, mesh.replicate, node_ranks)
        """The processes that hold this copy."""
        self.aside = PeerGroup(self.rank, self.size, mesh.replicate, node_ranks)
        """A connection to them for the thread that copies versions."""
        self.ahead, self.orders = PeerGroup(self.rank, self.size), PeerGroup(self.rank, self.size)
        """Connections to all, for the thread that sends or receives records, and for orders."""
        names = ("replicate", "shard")
        whole = init_device_mesh(device.type, (mesh.replicate, mesh.shard), mesh_dim_names=names)
        self.mesh: DeviceMesh = whole if mesh.replicate > 1 else whole["shard"]
        """Of FSDP2: gradients of several copies are added along the first dimension (HSDP)."""
        self.copies: dist.ProcessGroup = whole.get_group("replicate")
        """The processes that hold the same rows, in the order of copies."""
        grid = (mesh.replicate, mesh.shard // mesh.expert, mesh.expert)
        self.grid: DeviceMesh = init_device_mesh(device.type, grid, mesh_dim_names=("replicate", "runs", "experts"))
        """Experts are owned along the last dimension and cut into shards along the second."""
        self.context: ContextParallel | None = None
        """The processes that compute a micro-batch together with this one: neighbours in the order of ranks."""
        groups = [None, self.holders.group, self.aside.group, *whole.get_all_groups(), *self.grid.get_all_groups()]
        if mesh.context > 1:
            rows = (self.size // mesh.context, mesh.context)
            neighbours = init_device_mesh(device.type, rows, mesh_dim_names=("micro_batches", "context"))
            self.context = ContextParallel(neighbours.get_group("context"), self.clock)
            groups += neighbours.get_all_groups()
        for member in groups:
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
            nodes=self.dims.replicate,
            expert_ranks=self.dims.expert,
            context_ranks=self.dims.context,
            backend="nccl" if told else "gloo",
            torch=str(torch.__version__),
            **told,
        )

    def agree(self, digest: str, what: str) -> str:
        """The hash of `what` of this copy. All processes must call this. GroupError when copies have different
        ones."""
        every = self.gathered(digest, str)[:: self.dims.shard] if self.dims.replicate > 1 else []
        for copy, other in enumerate(every):
            if other != every[0]:
                raise GroupError(
                    f"the {what} of copy {copy} has hash {other}, copy 0 has {every[0]}: the machines round "
                    "otherwise, or one of them is damaged"
                )
        return digest

    def copied(self, work: Callable[[], tuple[T, dict[str, Tensor]]], kind: type[T]) -> tuple[T, dict[str, Tensor]]:
        """A value of this type and tensors that copy 0 makes by `work`, in every copy: from the process with the same
        rows. All processes must call this. The other copies get their tensors on the CPU. GroupError as `gathered`."""
        if self.dims.replicate == 1:
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
        together = self.size // self.dims.context
        number, member = divmod(self.rank, self.dims.context)
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
