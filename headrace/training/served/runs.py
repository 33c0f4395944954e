"""Runs of published tensors, read piece by piece as they are served: nothing is copied or packed before it is written.

A quantised expert is two or three tensors, elements and scales, which are computed from the same values when they are
read. NVFP4's tensor scale is computed from the whole tensor for each piece, so such a run is a whole tensor.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import mxfp8, operators
from headrace.kernels.block_scaled import nvfp4
from headrace.messages.weights import TensorInfo
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import formats
from headrace.policy.layout.formats import SCALE, TENSOR_SCALE
from headrace.weights import tensor_state
from headrace.weights.state import Bits


class ServedRun(NamedTuple):
    """A process's elements `start` to `start + items` of a tensor's flat view."""

    name: str
    start: int
    items: int
    read: Callable[[int, int], Bits]
    """(start, count) to the bits of `count` elements from `start` of the run; 8-byte types have two items each."""


Reader = Callable[[int, int], Tensor]
"""(start, count) to elements of a process's flat rows of a parameter, as they are served."""


def packed(config: PolicyConfig, name: str) -> bool:
    """Whether a tensor, by Hugging Face name, is published as quantised elements and scales."""
    return formats.form(config, name) is not None


def described(config: PolicyConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[TensorInfo]:
    """The published tensors of one Hugging Face name. dtype: of the served values."""
    if packed(config, name):
        return formats.described(config.expert_format, name, shape)
    return list(tensor_state.infos({name: torch.empty(shape, dtype=dtype, device="meta")}))


def of(config: PolicyConfig, name: str, start: int, items: int, read: Reader, at: int = 0) -> list[ServedRun]:
    """The runs of elements `start` to `start + items` of one Hugging Face name. at: their first element in `read`."""
    if not packed(config, name):
        return [ServedRun(name, start, items, lambda first, count: tensor_state.bits(read(at + first, count)))]
    if config.expert_format == "nvfp4":
        return _nvfp4(name, start, items, read, at)
    size = mxfp8.BLOCK

    def elements(first: int, count: int) -> Bits:
        return tensor_state.bits(operators.quantise(read(at + first, count).reshape(-1, size))[0])

    def scales(first: int, count: int) -> Bits:
        return tensor_state.bits(operators.quantise(read(at + first * size, count * size).reshape(-1, size))[1])

    return [ServedRun(name, start, items, elements), ServedRun(name + SCALE, start // size, items // size, scales)]


def _nvfp4(name: str, start: int, items: int, read: Reader, at: int) -> list[ServedRun]:
    if start:
        raise ValueError(f"{name}: a part of a tensor has no scale of the tensor; expected whole tensors for nvfp4")
    size = nvfp4.BLOCK

    def outer() -> Tensor:
        return nvfp4.outer_of_rows(read(at, items)[None])

    def blocks(first: int, count: int) -> operators.Nv:
        values = read(at + first * size, count * size).reshape(-1, size)
        return operators.quantise_nvfp4(values, outer().expand(len(values)))

    def elements(first: int, count: int) -> Bits:
        half = size // 2  # bytes of a block
        begin, end = first // half, -(-(first + count) // half)
        inside = blocks(begin, end - begin).q.reshape(-1)[first - begin * half :][:count]
        return tensor_state.bits(inside)

    return [
        ServedRun(name, 0, items // 2, elements),
        ServedRun(name + SCALE, 0, items // size, lambda first, count: tensor_state.bits(blocks(first, count).scale)),
        ServedRun(name + TENSOR_SCALE, 0, 1, lambda first, count: tensor_state.bits(outer())),
    ]


def whole(config: PolicyConfig, views: Mapping[str, Tensor]) -> tuple[tuple[TensorInfo, ...], list[ServedRun]]:
    """Descriptions, sorted by name, and runs of whole tensors. views: served values by Hugging Face name, before
    experts are packed; they are read later, where they are."""
    infos: list[TensorInfo] = []
    runs: list[ServedRun] = []
    for name, view in sorted(views.items()):
        infos += described(config, name, tuple(view.shape), view.dtype)
        runs += of(config, name, 0, view.numel(), _reader(view.detach()))
    return tuple(sorted(infos, key=lambda info: info.name)), runs


def _reader(view: Tensor) -> Reader:
    flat = view.reshape(-1)
    return lambda start, count: flat[start : start + count]
