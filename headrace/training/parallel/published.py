"""The part of the published tensors that a process holds, computed from its rows of fused parameters.

Every published tensor is one contiguous run of a fused parameter, and a process holds one contiguous run of each
parameter, so its part of a tensor is their intersection: nothing has to be gathered before it is written or read.
Experts in eight bits are two tensors, elements and scales; a process holds whole experts or whole rows of blocks.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import mxfp8, operators
from headrace.messages.weights import TensorInfo
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import formats, names
from headrace.training.parallel.rows import Run
from headrace.training.parallel.sharding import ShardedModel
from headrace.weights import state

_SCALE = "_scale"


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
    for name, view in names.views(config, whole).items():
        base = view if id(view) in by_id else view._base
        assert base is not None and view.is_contiguous()
        out[name] = Place(by_id[id(base)], int(view.storage_offset()), tuple(view.shape))
    return out


def infos(config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorInfo, ...]:
    """The published tensors, sorted by name."""
    out: list[TensorInfo] = []
    plain = {torch.float32: "F32", torch.bfloat16: "BF16"}[config.torch_dtype]
    for name, place in places(config, shapes).items():
        if packed(config, name):
            out.append(TensorInfo(name, "F8_E4M3", place.shape))
            scales = (*place.shape[:-1], place.shape[-1] // mxfp8.BLOCK)
            out.append(TensorInfo(name + _SCALE, "U8", scales))
        else:
            frozen = place.parameter.endswith(".correction")
            out.append(TensorInfo(name, "F32" if frozen else plain, place.shape))
    return tuple(sorted(out, key=lambda info: info.name))


def packed(config: PolicyConfig, name: str) -> bool:
    """Whether a tensor is published as eight-bit elements and scales."""
    return config.expert_format == "mxfp8" and formats.is_expert(name)


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
        row = torch.Size(sharded.shapes[place.parameter][1:]).numel()
        at, held = sharded.first[place.parameter] * row, local.numel()
        first = max(place.start, at)
        end = min(place.start + torch.Size(place.shape).numel(), at + held)
        if first < end:
            out.append(Part(name, place.parameter, first - place.start, first - at, end - first))
    return out


def runs(
    config: PolicyConfig, sharded: ShardedModel, reads: Mapping[str, Callable[[int, int], Tensor]], rank: int
) -> list[Run]:
    """This process's part of every published tensor. reads: elements of its rows as they are served, by parameter."""
    out: list[Run] = []
    for part in parts(config, sharded):
        if sharded.local[part.parameter].numel() == torch.Size(sharded.shapes[part.parameter]).numel() and rank:
            continue  # replicated: the first process writes it
        if not packed(config, part.name):
            out.append(Run(part.name, part.start, part.items, _plain(reads[part.parameter], part.own)))
            continue
        elements, scales = _packed(reads[part.parameter], part.own)
        out.append(Run(part.name, part.start, part.items, elements))
        size = mxfp8.BLOCK
        out.append(Run(part.name + _SCALE, part.start // size, part.items // size, scales))
    return out


def _plain(read: Callable[[int, int], Tensor], own: int) -> Callable[[int, int], state.Bits]:
    return lambda start, count: state.bits(read(own + start, count))


def _packed(
    read: Callable[[int, int], Tensor], own: int
) -> tuple[Callable[[int, int], state.Bits], Callable[[int, int], state.Bits]]:
    size = mxfp8.BLOCK

    def elements(start: int, count: int) -> state.Bits:
        return state.bits(operators.quantise(read(own + start, count).reshape(-1, size))[0])

    def scales(start: int, count: int) -> state.Bits:
        return state.bits(operators.quantise(read(own + start * size, count * size).reshape(-1, size))[1])

    return elements, scales


def take(config: PolicyConfig, sharded: ShardedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This process's rows of published tensors in a mapped file: by parameter, in the policy's dtype, on its device."""
    out = {
        name: torch.empty(local.shape, dtype=local.dtype if name.endswith(".correction") else config.torch_dtype)
        for name, local in sharded.local.items()
    }
    for part in parts(config, sharded):
        flat = tensors[part.name].reshape(-1)[part.start : part.start + part.items]
        if packed(config, part.name):
            size = mxfp8.BLOCK
            scales = tensors[part.name + _SCALE].reshape(-1)[part.start // size : (part.start + part.items) // size]
            flat = mxfp8.dequantise(flat.reshape(-1, size), scales.reshape(-1, 1), config.torch_dtype).reshape(-1)
        out[part.parameter].view(-1)[part.own : part.own + part.items] = flat
    return {name: value.to(sharded.local[name].device) for name, value in out.items()}
