"""The published form of weights when experts are served in eight or four bits: bytes and scales under their names.

Idea: in the model, a quantised expert is a tensor of the policy's dtype whose numbers are all representable in the
format, so products need no change. Quantising representable numbers loses nothing, so trainer, file and sampler hold
the same bytes, and the state hash is over those. X is a Hugging Face name.

    format    X.weight             X.weight_scale      X.weight_scale_2     bits per weight
    mxfp8     F8_E4M3 [N, K]       U8 [N, K / 32]                           8.25
    nvfp4     U8 [N, K / 2]        F8_E4M3 [N, K / 16] F32 [1]              4.5

The names of nvfp4 are those of NVIDIA's ModelOpt.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import mxfp8, operators
from headrace.kernels.block_scaled import nvfp4
from headrace.messages.weights import TensorInfo
from headrace.policy.config import CheckpointError, PolicyConfig

SCALE = "_scale"
"""Suffix of the tensor with the scales of a quantised tensor."""
TENSOR_SCALE = "_scale_2"
"""Suffix of the tensor with the scale of a whole quantised tensor."""


class Form(NamedTuple):
    """A number format as it is published."""

    block: int
    """Elements that share a scale."""
    suffixes: tuple[str, ...]
    """Of the tensors that hold one quantised tensor, in the order of their names."""
    bits: str


FORMS = {
    "mxfp8": Form(mxfp8.BLOCK, ("", SCALE), "eight"),
    "nvfp4": Form(nvfp4.BLOCK, ("", SCALE, TENSOR_SCALE), "four"),
}


def is_expert(name: str) -> bool:
    """Whether a Hugging Face name is one of a routed expert's weights."""
    return ".mlp.experts." in name


def form(config: PolicyConfig, name: str) -> Form | None:
    """The format of a tensor, by Hugging Face name; none where it is published in its own dtype."""
    return FORMS[config.expert_format] if config.expert_format and is_expert(name) else None


def described(grid: str, name: str, shape: Sequence[int]) -> list[TensorInfo]:
    """The tensors that hold a quantised tensor of `shape`."""
    *rows, width = shape
    if grid == "mxfp8":
        scales = (*rows, width // mxfp8.BLOCK)
        return [TensorInfo(name, "F8_E4M3", (*rows, width)), TensorInfo(name + SCALE, "U8", scales)]
    return [
        TensorInfo(name, "U8", (*rows, width // 2)),
        TensorInfo(name + SCALE, "F8_E4M3", (*rows, width // nvfp4.BLOCK)),
        TensorInfo(name + TENSOR_SCALE, "F32", (1,)),
    ]


def quantised(grid: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """The values of `described` for a matrix."""
    if grid == "mxfp8":
        return operators.quantise(tensor)
    outer = nvfp4.outer_of_matrices(tensor)
    q, scale, _ = operators.quantise_nvfp4(tensor, outer)
    return q, scale, outer[0].reshape(1)


def widened(grid: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of `quantised`, exactly; also of some of its rows under the same tensor scale."""
    if grid == "mxfp8":
        return mxfp8.dequantise(parts[0], parts[1], dtype)
    return nvfp4.dequantise(parts[0], parts[1], parts[2].expand(len(parts[0])), dtype)


def pack(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors as they are published."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (kind := form(config, name)) is None:
            out[name] = tensor
            continue
        parts = quantised(config.expert_format, tensor)
        out |= {name + suffix: part for suffix, part in zip(kind.suffixes, parts, strict=True)}
    return out


def unpack(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack`; experts that were never quantised are rounded. CheckpointError without a scale."""
    grid = config.expert_format
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((SCALE, TENSOR_SCALE)) and is_expert(name) and grid:
            continue
        if (kind := form(config, name)) is None:
            out[name] = tensor
        elif tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
            if missing := [name + suffix for suffix in kind.suffixes if name + suffix not in tensors]:
                raise CheckpointError(f"{name} is in {kind.bits} bits and has no {missing[0]}")
            out[name] = widened(grid, [tensors[name + suffix] for suffix in kind.suffixes], config.torch_dtype)
        else:
            out[name] = operators.rounded_weights(tensor.to(config.torch_dtype), grid)
    return out
