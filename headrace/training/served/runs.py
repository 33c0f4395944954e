"""Runs of published tensors, read piece by piece as they are served: nothing is copied or packed before it is written.

Experts in eight bits are two tensors, elements and scales, which are computed from the same values when they are read.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import mxfp8, operators
from headrace.messages.weights import TensorInfo
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import formats
from headrace.weights import state
from headrace.weights.state import Bits

SCALE = "_scale"
"""Suffix of the tensor with the scales of an expert's tensor."""


class Run(NamedTuple):
    """A process's elements `start` to `start + items` of a tensor's flat view."""

    name: str
    start: int
    items: int
    read: Callable[[int, int], Bits]
    """(start, count) to the bits of `count` elements from `start` of the run; 8-byte types have two items each."""


Reader = Callable[[int, int], Tensor]
"""(start, count) to elements of a process's flat rows of a parameter, as they are served."""


def packed(config: PolicyConfig, name: str) -> bool:
    """Whether a tensor, by Hugging Face name, is published as eight-bit elements and scales."""
    return config.expert_format == "mxfp8" and formats.is_expert(name)


def described(config: PolicyConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[TensorInfo]:
    """The published tensors of one Hugging Face name. dtype: of the served values."""
    if packed(config, name):
        scales = (*shape[:-1], shape[-1] // mxfp8.BLOCK)
        return [TensorInfo(name, "F8_E4M3", shape), TensorInfo(name + SCALE, "U8", scales)]
    return list(state.infos({name: torch.empty(shape, dtype=dtype, device="meta")}))


def of(config: PolicyConfig, name: str, start: int, items: int, read: Reader, at: int = 0) -> list[Run]:
    """The runs of elements `start` to `start + items` of one Hugging Face name. at: their first element in `read`."""
    if not packed(config, name):
        return [Run(name, start, items, lambda first, count: state.bits(read(at + first, count)))]
    size = mxfp8.BLOCK

    def elements(first: int, count: int) -> Bits:
        return state.bits(operators.quantise(read(at + first, count).reshape(-1, size))[0])

    def scales(first: int, count: int) -> Bits:
        return state.bits(operators.quantise(read(at + first * size, count * size).reshape(-1, size))[1])

    return [Run(name, start, items, elements), Run(name + SCALE, start // size, items // size, scales)]


def whole(config: PolicyConfig, views: Mapping[str, Tensor]) -> tuple[tuple[TensorInfo, ...], list[Run]]:
    """Descriptions, sorted by name, and runs of whole tensors. views: served values by Hugging Face name, before
    experts are packed; they are read later, where they are."""
    infos: list[TensorInfo] = []
    runs: list[Run] = []
    for name, view in sorted(views.items()):
        infos += described(config, name, tuple(view.shape), view.dtype)
        runs += of(config, name, 0, view.numel(), _reader(view.detach()))
    return tuple(sorted(infos, key=lambda info: info.name)), runs


def _reader(view: Tensor) -> Reader:
    flat = view.reshape(-1)
    return lambda start, count: flat[start : start + count]
