"""The part of the published tensors that a process holds, computed from its rows of fused parameters.

Every published tensor is one contiguous run of a fused parameter, and a process holds one contiguous run of each
parameter, so its part of a tensor is their intersection: nothing has to be gathered before it is written or read.
Experts in eight bits are two tensors, elements and scales; a process holds whole experts or whole rows of blocks.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import mxfp8
from headrace.messages.weights import TensorInfo
from headrace.policy.adapters import low_rank
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.formats import SCALE
from headrace.policy.layout.pieces import Pieces
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build, keeps_dtype, views
from headrace.training.parallel import far
from headrace.training.parallel.group import ProcessGroup
from headrace.training.parallel.sharding import ShardedModel
from headrace.training.served import runs as served_runs
from headrace.training.served.runs import Reader, ServedRun, packed
from headrace.weights import tensor_state


class Place(NamedTuple):
    """The place of a published tensor in a parameter."""

    parameter: str
    start: int
    """Its first element in the flat parameter."""
    shape: tuple[int, ...]


def places(config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """The place of every published tensor, by Hugging Face name, before experts are packed. shapes: whole
    parameters."""
    whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    by_id = {id(tensor): name for name, tensor in whole.items()}
    out: dict[str, Place] = {}
    for name, view in views(config, whole).items():
        base = view if id(view) in by_id else view._base
        assert base is not None and view.is_contiguous()
        out[name] = Place(by_id[id(base)], int(view.storage_offset()), tuple(view.shape))
    return out


def infos(config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorInfo, ...]:
    """The published tensors, sorted by name."""
    out: list[TensorInfo] = []
    for name, place in places(config, shapes).items():
        dtype = torch.float32 if keeps_dtype(config, place.parameter) else config.torch_dtype
        out += served_runs.described(config, name, place.shape, dtype)
    return tuple(sorted(out, key=lambda info: info.name))


class Part(NamedTuple):
    """A process's part of one tensor: `items` elements, at `start` of the flat tensor and at `own` of its flat rows."""

    name: str
    parameter: str
    start: int
    own: int
    items: int


def parts(config: PolicyConfig, sharded: ShardedModel) -> list[Part]:
    """Every part that this process holds, in the order of names; every process holds replicated parameters whole."""
    out: list[Part] = []
    for name, place in sorted(places(config, sharded.shapes).items()):
        local = sharded.local[place.parameter]
        at, held = sharded.start[place.parameter], local.numel()
        first = max(place.start, at)
        end = min(place.start + torch.Size(place.shape).numel(), at + held)
        if first < end:
            out.append(Part(name, place.parameter, first - place.start, first - at, end - first))
    return out


def runs(config: PolicyConfig, sharded: ShardedModel, reads: Mapping[str, Reader], rank: int) -> list[ServedRun]:
    """This process's part of every published tensor. reads: elements of its rows as they are served, by parameter."""
    out: list[ServedRun] = []
    for part in parts(config, sharded):
        if sharded.local[part.parameter].numel() == torch.Size(sharded.shapes[part.parameter]).numel() and rank:
            continue  # replicated: the first process writes it
        out += served_runs.of(config, part.name, part.start, part.items, reads[part.parameter], part.own)
    return out


@torch.no_grad()
def fill(config: PolicyConfig, sharded: ShardedModel, read: far.Read, whole: Mapping[str, Place]) -> None:
    """Load this process's rows from a checkpoint, one part after the other, rounded to the policy's dtype. read: rows
    of a published tensor. whole: the tensors that the checkpoint has."""
    for part in parts(config, sharded):
        if part.name not in whole:
            continue
        row = torch.Size(whole[part.name].shape[1:]).numel()
        value = read(part.name, part.start // row, part.items // row)
        if not keeps_dtype(config, part.parameter):
            value = value.to(config.torch_dtype)
        sharded.local[part.parameter].view(-1)[part.own : part.own + part.items].copy_(value.reshape(-1))


def take(config: PolicyConfig, sharded: ShardedModel, read: far.Read) -> dict[str, Tensor]:
    """This process's rows of published tensors: by parameter, in the policy's dtype, on its device. read: items of a
    tensor."""
    out = {
        name: torch.empty(local.shape, dtype=local.dtype if keeps_dtype(config, name) else config.torch_dtype)
        for name, local in sharded.local.items()
    }
    for part in parts(config, sharded):
        flat = read(part.name, part.start, part.items)
        if packed(config, part.name):
            size = mxfp8.BLOCK
            scales = read(part.name + SCALE, part.start // size, part.items // size)
            flat = mxfp8.dequantise(flat.reshape(-1, size), scales.reshape(-1, 1), config.torch_dtype).reshape(-1)
        out[part.parameter].view(-1)[part.own : part.own + part.items] = flat
    return {name: value.to(sharded.local[name].device) for name, value in out.items()}


def read(config: PolicyConfig, sharded: ShardedModel, world: ProcessGroup, source: Path) -> int:
    """Fill the shards from a checkpoint folder or a snapshot file of node 0: in copy 0 each process reads its own rows,
    in the others it gets them from the process of copy 0 that has the same ones. Returns the bytes that were read here,
    for itself and for other nodes, or by that process. All processes call it. CheckpointError of the policy."""
    count = 0
    # Neither a folder nor a version of a policy without adapters has any: the ones that are here stay.
    adapted = source.is_file() and any(map(low_rank.is_published, tensor_state.read(source)))
    adapted = any(world.gathered(adapted, bool))
    whole = places(config, sharded.shapes)
    whole = {name: place for name, place in whole.items() if adapted or not low_rank.is_published(name)}
    if world.copy == 0:
        pieces: Pieces | _Loaded | None = None
        if world.place < world.holders.near:
            pieces = Pieces(config, source, {name: place.shape for name, place in whole.items()})
            if not pieces.whole:
                pieces = _Loaded(config, sharded.model.numerics, source)
        with far.reading(world.holders, pieces.rows if pieces is not None else None) as rows:
            fill(config, sharded, rows, whole)
        count = pieces.read_bytes if pieces is not None else 0
    for name, tensor in sharded.local.items():  # one after the other, so that no process has a second copy
        count, values = world.copied(partial(_told, count, name, tensor), int)
        if world.copy:
            tensor.copy_(values[name])
    return count


class _Loaded:
    """A folder that only the policy's library can read: this process holds all of it meanwhile."""

    def __init__(self, config: PolicyConfig, numerics: Numerics, folder: Path) -> None:
        model = build(config, numerics)
        model.load(folder)
        self._views = model.views()
        self.read_bytes = sum(view.nbytes for view in self._views.values())

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """As `Pieces.rows`."""
        return self._views[name][first : first + count]


def _told(value: int, name: str, tensor: Tensor) -> tuple[int, dict[str, Tensor]]:
    return value, {name: tensor}
