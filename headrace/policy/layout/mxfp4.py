"""The experts of gpt-oss in a checkpoint folder: plain and transposed, or in MXFP4 as OpenAI publishes them.

MXFP4 (OCP Microscaling): four bits in e2m1 per number, 32 numbers share a power of two in e8m0. `X_blocks` is uint8
[E, rows, D / 32, 16], low half byte first, and `X_scales` is uint8 [E, rows, D / 32]. The run has [E, rows, D], as the
products need them; transformers has [E, D, rows]. Every number of MXFP4 is a number of bfloat16, so nothing is lost.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.policy.config import CheckpointError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS, _BLOCKS, _SCALES = ".rows", "_blocks", "_scales"
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def outward(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A run's tensors as transformers names and lays them out."""
    return {
        name.removesuffix(_ROWS): tensor.transpose(1, 2) if name.endswith(_ROWS) else tensor
        for name, tensor in tensors.items()
    }


def folder_names(name: str) -> list[str]:
    """The names that a folder may have for a run's tensor of this name."""
    plain = name.removesuffix(_ROWS)
    return [plain, plain + _BLOCKS, plain + _SCALES] if plain != name else []


def inward(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A folder's tensors as a run has them; MXFP4 becomes `dtype`. CheckpointError when scales are missing."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removesuffix(_BLOCKS)
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if name.endswith(_BLOCKS) and plain.endswith(_EXPERTS):
            if plain + _SCALES not in tensors:
                raise CheckpointError(f"{name} is in four bits and has no {plain + _SCALES}")
            out[plain + _ROWS] = dequantise(tensor, tensors[plain + _SCALES], dtype)
        elif name.endswith(_EXPERTS):
            out[name + _ROWS] = tensor.transpose(1, 2).contiguous()
        else:
            out[name] = tensor
    return out


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> [..., 32 G] in `dtype`. CheckpointError for other shapes."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16 or blocks.dtype != torch.uint8:
        raise CheckpointError(
            f"expected MXFP4 blocks uint8 [..., G, 16] and scales [..., G], got {blocks.dtype} {list(blocks.shape)} "
            f"and {list(scales.shape)}"
        )
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    factors = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127).to(dtype)
    return (table[halves.int()] * factors[..., None]).flatten(-2)
