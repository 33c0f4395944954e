"""Two processes that own the experts of a model, each half of them. Here they are threads, connected by gloo."""

from datetime import timedelta

import torch
from torch import nn
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]

from headrace.policy.layer import Layer
from headrace.policy.model import Model
from headrace.training.figures.clock import Clock
from headrace.training.parallel.context import ContextParallel
from headrace.training.parallel.experts import ExpertParallel, Groups
from headrace.training.parallel.sharding import OWNED


def connected(store: HashStore, name: str, rank: int, size: int) -> ProcessGroup:
    """A group of this name. All its members must call it at once."""
    place = PrefixStore(name, store)
    group = ProcessGroup(place, rank, size)
    gloo = ProcessGroupGloo(place, rank, size, timedelta(seconds=60))  # a failure of one ends the other
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def own(model: Model, store: HashStore, rank: int, *, together: bool = False) -> None:
    """Leave the model the float32 masters of one half of its experts. together: the two also share the tokens of a
    micro-batch; otherwise each has micro-batches of its own."""
    clock = Clock()
    nodes, copies = (connected(store, f"{name} {rank}", 0, 1) for name in ("nodes", "copies"))
    groups = Groups(connected(store, "owners", rank, 2), copies, nodes, clock)
    each = model.config.experts // 2
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if not layer.sparse:
            continue
        for name in OWNED:
            whole = layer.get_parameter(name).detach()
            layer.register_parameter(name, nn.Parameter(whole[rank * each : (rank + 1) * each].float().clone()))
        quantised = model.config.expert_format == "mxfp8"
        layer.owned = ExpertParallel(groups, each, model.config.torch_dtype, quantised)
    if together:
        model.shared = ContextParallel(connected(store, "context", rank, 2), clock)
