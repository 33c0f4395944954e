"""The arithmetic of low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B (A x), W fixed.

The idea: sampler and trainer both compute the adapter's two thin products beside the product by W. They are the
batch-invariant products of all other weights, so exact mode, replayed routes and re-scoring hold without a further
rule, and the numerics fingerprint covers them. A and B are published under names of their own beside W. The bytes of W
are those of version 0 for ever, and a delta has frames for changed blocks only: it carries A and B.

The other way is to merge on arrival: both sides round W + BA to the policy's dtype. It saves the sampler the thin
products, but the trainer then needs the gradient of every whole W to get those of A and B, a second copy of every W to
merge the next version from, and in bfloat16 an early BA is lost in the rounding of W. `merge` does it once, for an
export, in float32.

A starts random and B as zeros, so version 0 computes what its base computes.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from headrace.kernels import operators
from headrace.policy.adapters.shape import A, B, Module, modules, targeted
from headrace.policy.config import Adapter, PolicyConfig

_A, _B = "_lora_a", "_lora_b"
_PEFT = ".lora_A.default.", ".lora_B.default."
"""In the names of PEFT's parameters."""


class Fused(NamedTuple):
    """The projections in one parameter, and those with an adapter."""

    parts: tuple[Module, ...]
    targets: frozenset[str]
    scale: float


def is_adapter(name: str) -> bool:
    """Whether a parameter, by headrace's name, is part of an adapter."""
    return name.endswith((_A, _B)) or any(part in name for part in _PEFT)


def is_published(name: str) -> bool:
    """Whether a published tensor is part of an adapter."""
    return name.endswith((A, B))


def add_parameters(layer: nn.Module, c: PolicyConfig, index: int) -> dict[str, Fused]:
    """Register a layer's A [rank, inputs] and B [outputs, rank], unset. Returns the adapted parameters by name."""
    if c.adapter is None:
        return {}
    rank, dtype = c.adapter.rank, c.torch_dtype
    for module in targeted(c, index):
        layer.register_parameter(module.name + _A, nn.Parameter(torch.empty(rank, module.inputs, dtype=dtype)))
        layer.register_parameter(module.name + _B, nn.Parameter(torch.empty(module.outputs, rank, dtype=dtype)))
    targets = frozenset(c.adapter.targets)
    return {
        name: Fused(parts, targets, scale(c.adapter))
        for name, parts in modules(c, index).items()
        if any(part.name in targets for part in parts)
    }


def scale(adapter: Adapter) -> float:
    """The factor of BA."""
    return adapter.alpha / adapter.rank


def linear(layer: nn.Module, x: Tensor, name: str, exact: bool) -> Tensor:
    """x [N, K] by the layer's parameter `name`, with its adapters -> [N, M]."""
    out = operators.linear(x, getattr(layer, name), exact)
    fused = cast("Mapping[str, Fused]", layer.adapted).get(name)
    if fused is None:
        return out
    pieces = []
    for piece, part in zip(torch.split(out, [part.outputs for part in fused.parts], -1), fused.parts, strict=True):
        if part.name in fused.targets:
            low = operators.linear(x, getattr(layer, part.name + _A), exact)
            piece = piece + fused.scale * operators.linear(low, getattr(layer, part.name + _B), exact)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


@torch.no_grad()
def reset(model: nn.Module, seed: int) -> None:
    """New adapters, the same for the same seed: A uniform as PEFT draws it, B zero. Other weights stay."""
    parameters = dict(model.named_parameters())
    for name, value in initial({name: tuple(parameter.shape) for name, parameter in parameters.items()}, seed):
        parameters[name].copy_(value)


def initial(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and first value, float32, of every adapter among the parameters with these shapes, in their order."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(_A) or _PEFT[0] in name:
            yield name, (2.0 * torch.rand(shape, generator=generator) - 1.0) * shape[1] ** -0.5
        elif is_adapter(name):
            yield name, torch.zeros(shape)


def views(c: PolicyConfig, layer: Mapping[str, Tensor], index: int, at: str) -> dict[str, Tensor]:
    """Published name -> tensor of a layer's adapters. layer: its parameters under headrace's names."""
    out: dict[str, Tensor] = {}
    for module in targeted(c, index):
        out[f"{at}{module.path}.{A}"] = layer[module.name + _A]
        out[f"{at}{module.path}.{B}"] = layer[module.name + _B]
    return out


def merge(adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors without adapters: W + (alpha / rank) B A, computed in float32 and rounded once."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_published(name):
            continue
        stem = name.removesuffix("weight")
        if stem + A in tensors:
            change = tensors[stem + B].float() @ tensors[stem + A].float()
            tensor = (tensor.float() + scale(adapter) * change).to(tensor.dtype)
        out[name] = tensor
    return out
