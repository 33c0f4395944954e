"""One trainer on several processes: shards of every layer (FSDP2), experts by owner, the update of one process.

Idea: `step.take` with a `ProcessGroup` as its `data_parallel`. A batch's micro-batches are dealt out in turn, and
everything else (corrections, parts of a batch, refusals, the guard) is what one process does. FSDP only gathers weights
before it multiplies, so in exact mode each token's log-probability has the bits that a single process gets, and the
loss, added up in the order of the micro-batches, is the same number. Gradients are sums over processes: equal bit for
bit while at most two micro-batches are added (a sum of two has one order), otherwise within rounding.

What leaves is independent of the layout: `published` gathers whole tensors, so the same state publishes the same bytes
from any number of processes, and torch.distributed.checkpoint writes shards that another number of them reads.

    torchrun --nproc-per-node 4 your_program.py      # in each process; gloo on CPUs, nccl on GPUs:

    world = start()
    state = ShardedState(shard(model, world, expert_parallel=True))
    outcome = take(state, batch, Recipe(...), helpers=Helpers(data_parallel=world))
    publish(state, world, path)
    stop()                                           # at the very end

Trade-off: experts belong to one process of the whole group or to none (`expert_parallel`); there is no second
dimension of replicas. PyTorch FSDP2: `torch.distributed.fsdp.fully_shard` (SimpleFSDP, arXiv 2411.00284, describes the
design of per-parameter shards).
"""

import contextlib
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from headrace.policy.layer import Layer
from headrace.policy.layout import formats, names
from headrace.policy.model import Model
from headrace.training.parallel.experts import ExpertParallel
from headrace.training.state import TrainerState
from headrace.weights import snapshot

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train one policy: a `step.DataParallel`."""

    mesh: DeviceMesh
    rank: int
    size: int

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """As `step.DataParallel`: micro-batches are dealt out in turn, and every process gets all results."""
        mine: dict[int, T] = {}
        for first in range(0, count, self.size):
            at = first + self.rank
            if at < count:
                mine[at] = work(at, True)
            else:  # a collective waits for everybody
                work(0, False)
        told: list[dict[int, T]] = [{} for _ in range(self.size)]
        dist.all_gather_object(told, mine)
        found = {at: value for part in told for at, value in part.items()}
        return [found[at] for at in range(count)]


class ShardedState(TrainerState):
    """The part of a sharded model's state that one process owns."""

    def published(self) -> dict[str, Tensor]:
        """As TrainerState, gathered: every process must call it."""
        return published(self.model)

    def gradient_norm(self) -> float:
        """Euclidean norm over all shards of all gradients; the same number in every process."""
        total = torch.zeros((), dtype=torch.float64)
        for _, gradient in self.gradients():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            total += torch.linalg.vector_norm(local, dtype=torch.float64).square().cpu()
        dist.all_reduce(total)
        return math.sqrt(total) if math.isfinite(total) else math.nan


def start(backend: str = "gloo", device: str = "cpu") -> ProcessGroup:
    """Join the group that torchrun describes in the environment."""
    if not dist.is_initialized():
        dist.init_process_group(backend)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return ProcessGroup(mesh, dist.get_rank(), dist.get_world_size())


def stop() -> None:
    """Leave the group, all together, as the last thing that a program does, with no sharded model in any name.

    Gloo's threads let go of tensors late; one that is left until the interpreter ends aborts the process (PyTorch
    #179291, #190489).
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def shard(model: Model, world: ProcessGroup, *, expert_parallel: bool = False) -> Model:
    """Cut a model that is whole and equal in every process; in place. Make the `ShardedState` afterwards.

    expert_parallel: experts are owned, not gathered. ValueError when they cannot be dealt out evenly.
    """
    experts = model.config.experts
    if expert_parallel and (not experts or experts % world.size):
        raise ValueError(f"{experts} experts cannot be dealt out evenly to {world.size} processes")
    owned: set[nn.Parameter] = set()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if expert_parallel and layer.sparse:
            for name in ("gate_up", "down"):
                part = nn.Parameter(distribute_tensor(layer.get_parameter(name).data, world.mesh, [Shard(0)]))
                layer.register_parameter(name, part)
                owned.add(part)
            layer.function = ExpertParallel(world.mesh.get_group(), layer.function)
        own = owned | {parameter for parameter in layer.parameters() if not parameter.requires_grad}
        _sum(fully_shard(layer, mesh=world.mesh, ignored_params=own))
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    _sum(fully_shard(model, mesh=world.mesh, ignored_params=owned | frozen))
    return model


def _sum(module: FSDPModule) -> None:
    """Gradients are added, not averaged: the loss is divided by the whole batch's constant already."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def published(model: Model) -> dict[str, Tensor]:
    """The served bytes, whole, under Hugging Face names. Every process must call it; all get them."""
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in model.named_parameters()
    }
    return formats.pack(model.config, {name: view.clone() for name, view in names.views(model.config, whole).items()})


def publish(state: ShardedState, world: ProcessGroup, path: Path) -> str:
    """Write the served bytes as one file, from the first process; their state hash, in every one."""
    tensors = state.published()
    told = [snapshot.write(path, tensors) if world.rank == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return told[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """One process without a group is what was asked for: torch need not wonder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")
        yield


def save(state: TrainerState, folder: Path) -> None:
    """A sharded checkpoint. Every process must call it; without a group it is that of one process."""
    tensors: dict[str, Tensor] = {**state.tensors(), "counters": torch.tensor([state.version, state.step])}
    with _quiet():
        state_dict_saver.save(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(state: TrainerState, folder: Path) -> None:
    """Restore a state in place from a checkpoint of any number of processes, sharded as the state's model is."""
    counters = {"counters": torch.zeros(2, dtype=torch.int64)}
    alone = not dist.is_initialized()
    with _quiet():
        state_dict_loader.load(counters, checkpoint_id=folder, no_dist=alone)
    version, step = counters["counters"].tolist()
    tensors = {name: torch.empty_like(value) for name, value in state.tensors().items()}
    if step:
        for key, (name, master) in itertools.product(("exp_avg", "exp_avg_sq"), state.master.items()):
            tensors[f"{key}.{name}"] = torch.empty_like(master.detach())
    with _quiet():
        state_dict_loader.load(tensors, checkpoint_id=folder, no_dist=alone)
    state.restore(tensors, version=version, step=step)
