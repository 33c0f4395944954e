"""A model in shards: FSDP2 over float32 masters; with `[trainer] mesh.expert`, each expert has an owner.

The idea: the optimizer's float32 masters are the shards themselves. They are cast to the policy's dtype when a layer is
gathered, so the forward pass multiplies the very bits that are published, and gradients arrive in float32. PyTorch
FSDP2: `torch.distributed.fsdp.fully_shard` (SimpleFSDP, arXiv 2411.00284, describes per-parameter shards).

Gradients are added by FSDP2's reduce-scatter, and over several copies of the state by its all-reduce (HSDP). The order
of such a sum depends on the number of processes and on the library: the same layout gives the same bits, another one
rounds otherwise.

With `offload` the shards, their gradients and the optimizer are in the host's memory (FSDP's CPUOffloadPolicy): shards
are copied to the device when a layer is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from headrace.config import Mesh
from headrace.kernels import dispatch, operators
from headrace.policy import provider
from headrace.policy.config import PolicyConfig
from headrace.policy.layer import Layer
from headrace.policy.numerics import Numerics
from headrace.policy.seam import PolicyModel
from headrace.training.parallel.experts import ExpertParallel, Groups, OnGrid
from headrace.training.parallel.group import ProcessGroup, gather, scatter_sum
from headrace.training.state import freeze

OWNED = ("gate_up", "down")
"""Parameters of a mixture that hold one matrix per expert."""


def _buffer(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


class TimedScatter:
    """FSDP's reduce-scatter, with its time."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self.allocate = _buffer
        """The function with which FSDP allocates its buffers."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """As `torch.distributed.fsdp` calls it."""
        with self.world.clock.transfer():
            scatter_sum(output_tensor, input_tensor, group, op)


class TimedGather:
    """FSDP's all-gather. On the CPU it waits for the result at once, so that its time is known."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self.allocate = _buffer
        """The function with which FSDP allocates its buffers."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """As `torch.distributed.fsdp` calls it."""
        later = async_op and dispatch.on_gpu(output_tensor)
        with self.world.clock.transfer():
            return gather(output_tensor, input_tensor, group, later=later)


@dataclass(frozen=True)
class ShardedModel:
    """A model of which this process holds a part. Rows are along the first dimension. Where experts with owners
    are too few to be divided, their matrices are stacked and cut into rows."""

    model: PolicyModel
    parameters: dict[str, nn.Parameter]
    """FSDP's parameters, by name; `grad` is this process's part of the gradient."""
    local: dict[str, Tensor]
    """This process's rows of every parameter: float32; frozen parameters, and those of a fixed model, in the policy's
    dtype."""
    start: dict[str, int]
    """Index of the first of their elements in the flat whole parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the whole parameters."""

    def reshard(self) -> None:
        """Free gathered weights, so that the next forward pass gathers them from the shards again."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Policies(NamedTuple):
    """How FSDP casts shards, and where they are."""

    cast: MixedPrecisionPolicy
    place: OffloadPolicy


def build(
    config: PolicyConfig,
    numerics: Numerics,
    world: ProcessGroup,
    *,
    offload: bool = False,
    fixed: bool = False,
    frozen: Sequence[str] = (),
) -> ShardedModel:
    """A sharded model with unset weights. With owners of experts `layout.divided` is true. offload: the shards are in
    the host's memory; not with owners of experts. fixed: the weights are never updated: shards have the policy's dtype,
    and nothing stays gathered after a forward pass. frozen: patterns of parameters that are not trained."""
    # The whole model may be larger than the memory of a process.
    model = provider.build(config, numerics, device="meta")
    model.place, model.shared = world.device, world.context  # with offload the parameters are on the host
    model.most = lambda count: max(world.gathered(count, int))
    held = config.torch_dtype if fixed else torch.float32
    named = model.named_parameters()
    owned = {each for name, each in named if not each.requires_grad and provider.keeps_dtype(config, name)}
    freeze(model, frozen)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    policy = Policies(
        MixedPrecisionPolicy(param_dtype=config.torch_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy(),
    )
    start: dict[str, int] = {}
    modules: list[FSDPModule] = []
    for index, layer in enumerate(model.blocks):
        quantised = config.expert_format == "mxfp8"
        if isinstance(layer, Layer) and layer.sparse and quantised:
            layer.function = OnGrid(layer.function, operators.rounded)
        if isinstance(layer, Layer) and layer.sparse and world.dims.expert > 1:
            for name in OWNED:
                whole = layer.get_parameter(name)
                part, run = torch.empty(_owned(whole.shape, world.dims), dtype=held, device=world.device), whole.numel()
                layer.register_parameter(name, nn.Parameter(part))
                owned.add(layer.get_parameter(name))
                number, member = divmod(world.place, world.dims.expert)
                start[f"layers.{index}.{name}"] = member * (run // world.dims.expert) + number * part.numel()
            owners, copies = world.grid.get_group("experts"), world.grid.get_group("runs")
            groups = Groups(owners, copies, world.copies, world.clock)
            each = config.experts // world.dims.expert
            layer.owned = ExpertParallel(groups, each, config.torch_dtype, quantised)
        modules.append(_cut(layer, world, policy, owned, held))
    modules.append(_cut(model, world, policy, owned, held))
    if fixed:  # FSDP keeps those of the outermost module for a backward pass
        modules[-1].set_reshard_after_forward(True, recurse=False)
    for method in ("forward_cached", "sampled_logprobs"):
        register_fsdp_forward_method(model, method)
    for module in modules:
        module.set_custom_all_gather(TimedGather(world))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(TimedScatter(world))  # type: ignore[arg-type]
    parameters = dict(model.named_parameters())
    local: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            part = parameter.detach()
            assert isinstance(part, DTensor)
            local[name] = part.to_local()
            row = torch.Size(shapes[name][1:]).numel()
            start[name] = min(-(-shapes[name][0] // world.dims.shard) * world.place, shapes[name][0]) * row
        else:
            local[name] = parameter.detach()
            start.setdefault(name, 0)
    return ShardedModel(model, parameters, local, start, shapes)


def _owned(whole: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape of a process's part of experts [E, rows, n]: whole experts, or rows of them where they are too few."""
    experts, rows, width = whole
    each, runs = experts // mesh.expert, mesh.shard // mesh.expert
    return (each * rows // runs, width) if each % runs else (each // runs, rows, width)


def _cut(
    module: nn.Module, world: ProcessGroup, policy: Policies, owned: set[nn.Parameter], held: torch.dtype
) -> FSDPModule:
    """Shard the parameters that no inner module has sharded. They become uninitialised memory, module by module: of
    dtype `held`, frozen ones of the policy's. owned: parameters that every process holds as they are."""
    renewed: dict[nn.Parameter, nn.Parameter] = {}  # a parameter may have several owners
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in owned and parameter.is_meta:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
                owner.register_parameter(name, nn.Parameter(whole, requires_grad=False))
                owned.add(owner.get_parameter(name))
            elif not isinstance(parameter, DTensor) and parameter not in owned:
                learns = parameter.requires_grad
                memory = torch.empty(parameter.shape, dtype=held if learns else parameter.dtype)
                new = renewed.setdefault(parameter, nn.Parameter(memory, requires_grad=learns))
                owner.register_parameter(name, new)
                renewed[new] = new
    ignored = owned & set(module.parameters())
    cut: FSDPModule = fully_shard(
        module, mesh=world.mesh, mp_policy=policy.cast, offload_policy=policy.place, ignored_params=ignored
    )
    cut.set_gradient_divide_factor(1.0)  # gradients are added: the loss is divided by the batch's constant already
    cut.set_force_sum_reduction_for_comms(True)
    return cut
