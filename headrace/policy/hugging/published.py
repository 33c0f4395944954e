"""The names under which a policy of transformers is published: its checkpoints on the hub have the same ones.

The library fuses and renames tensors when it reads a folder (experts become one tensor of a layer), and undoes that
when it writes one. Servers want the folder's names. So the library's writing is applied to numbers of rows instead of
weights: every published tensor turns out to be a run of rows of a parameter, and is a view of it. Where one is not (it
is transposed), all parameters are published under the model's own names.
"""

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.policy.config import PolicyConfig
from headrace.policy.hugging import adapter, library


class Rows(NamedTuple):
    """A published tensor as rows of a parameter, whose last dimension it keeps."""

    parameter: str
    first: int
    shape: tuple[int, ...]


@cache
def places(config: PolicyConfig) -> dict[str, Rows]:
    """The place of every published tensor."""
    if config.adapter is not None:
        bare = msgspec.structs.replace(config, adapter=None)
        named = {adapter.plain(name): (name, value) for name, value in adapter.skeleton(config).named_parameters()}
        out = {name: place._replace(parameter=named[place.parameter][0]) for name, place in places(bare).items()}
        low = {name: Rows(of, 0, tuple(value.shape)) for name, (of, value) in named.items() if ".lora_" in of}
        return out | low
    parameters = dict(library.outline(config).named_parameters())
    with contextlib.suppress(Exception):  # of an operation of the library that is not one of rows
        return _reverted(config, parameters)
    return {name: Rows(name, 0, tuple(parameter.shape)) for name, parameter in parameters.items()}


def _reverted(config: PolicyConfig, parameters: Mapping[str, Tensor]) -> dict[str, Rows]:
    from transformers.core_model_loading import revert_weight_conversion

    numbers: dict[str, Tensor] = {}
    owner: list[tuple[int, str]] = []
    at = 0
    for name, parameter in parameters.items():
        rows = parameter.shape[:-1].numel()
        numbers[name] = torch.arange(at, at + rows).view(*parameter.shape[:-1], 1)
        owner.append((at, name))
        at += rows
    firsts = torch.tensor([first for first, _ in owner])
    out: dict[str, Rows] = {}
    for name, run in revert_weight_conversion(library.outline(config), numbers).items():
        flat = run.reshape(-1)
        first, parameter_name = owner[int(torch.searchsorted(firsts, flat[0], right=True)) - 1]
        whole = parameters[parameter_name]
        if run.shape[-1] != 1 or not torch.equal(flat, torch.arange(len(flat)) + flat[0]):
            raise ValueError(f"{name} is no run of rows")
        out[name] = Rows(parameter_name, int(flat[0]) - first, (*run.shape[:-1], *whole.shape[-1:]))
    if sum(torch.Size(each.shape).numel() for each in out.values()) != sum(map(torch.numel, parameters.values())):
        raise ValueError("the published tensors do not fit the model")
    return out


@cache
def kept(config: PolicyConfig) -> frozenset[str]:
    """The parameters, by `HuggingModel`'s names, that are a checkpoint's buffers: they keep their dtype."""
    named = library.outline(msgspec.structs.replace(config, adapter=None)).named_parameters()
    return frozenset(f"inner.{name}" for name, parameter in named if not parameter.requires_grad)


def views(config: PolicyConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published name -> the part of a parameter that it names, in its memory. parameters: by `HuggingModel`'s names."""
    out: dict[str, Tensor] = {}
    for name, place in places(config).items():
        whole = parameters[f"inner.{place.parameter}"]
        if tuple(whole.shape) == place.shape:
            out[name] = whole
            continue
        count = torch.Size(place.shape[:-1]).numel()
        out[name] = whole.view(-1, whole.shape[-1])[place.first : place.first + count].view(place.shape)
    return out
