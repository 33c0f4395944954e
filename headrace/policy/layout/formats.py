"""The published form of weights when experts are served in eight bits: bytes and scales under Hugging Face names.

Idea: in the model, an mxfp8 expert is a tensor of the policy's dtype whose numbers are all representable in mxfp8, so
products need no change. It is published as `X.weight` in e4m3 and `X.weight_scale` in e8m0 (as uint8), 8.25 bits per
weight. Quantising representable numbers loses nothing, so trainer, file and sampler hold the same bytes, and the state
hash is over those.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.kernels import mxfp8
from headrace.policy.config import CheckpointError, PolicyConfig

_SCALE = "_scale"


def is_expert(name: str) -> bool:
    """Whether a Hugging Face name is one of a routed expert's weights."""
    return ".mlp.experts." in name


def pack(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors as they are published."""
    if config.expert_format != "mxfp8":
        return dict(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_expert(name):
            out[name], out[name + _SCALE] = mxfp8.quantise(tensor)
        else:
            out[name] = tensor
    return out


def unpack(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack`; experts that were never quantised are rounded. CheckpointError without a scale."""
    if config.expert_format != "mxfp8":
        return dict(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE) and is_expert(name):
            continue
        if not is_expert(name):
            out[name] = tensor
        elif tensor.dtype == torch.float8_e4m3fn:
            if name + _SCALE not in tensors:
                raise CheckpointError(f"{name} is in eight bits and has no {name + _SCALE}")
            out[name] = mxfp8.dequantise(tensor, tensors[name + _SCALE], config.torch_dtype)
        else:
            out[name] = mxfp8.rounded(tensor.to(config.torch_dtype))
    return out
