"""Weights in eight bits with a factor for each block, as DeepSeek-V3, Kimi-K2, Qwen3 and MiniMax-M2 are published.

X.weight is F8_E4M3 [N, K] and X.weight_scale_inv float32 or e8m0 [N / rows, K / columns], both rounded up: the factor
of every number of a block of `weight_block_size`. They become numbers of the policy's dtype when they are read, in
float32 and rounded once, and are trained and published as such.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.policy.config import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALES = "_scale_inv"
"""Suffix of the tensor with the factors of a tensor."""
METHOD = "fp8"


class Blocks(NamedTuple):
    """The block of a matrix that has one factor."""

    rows: int
    columns: int

    def shape(self, matrix: list[int]) -> list[int]:
        """Of the factors of a matrix."""
        return [-(-matrix[0] // self.rows), -(-matrix[1] // self.columns)]

    def of(self, first: int, count: int) -> slice:
        """The rows of factors for rows `first` to `first + count` of a matrix."""
        return slice(first // self.rows, -(-(first + count) // self.rows))

    def widened(self, weight: "Tensor", factors: "Tensor", first: int, dtype: "torch.dtype") -> "Tensor":
        """Rows from `first` on as numbers of `dtype`: weight [n, K] in eight bits times its rows of factors."""
        import torch  # here, so that a plan or a command reads a shape without torch

        row = (torch.arange(len(weight)) + first) // self.rows - first // self.rows
        if factors.dtype == torch.uint8:  # exponents alone
            factors = factors.view(torch.float8_e8m0fnu)
        wide = factors.float().repeat_interleave(self.columns, 1)[:, : weight.shape[1]]
        return (weight.float() * wide[row]).to(dtype)


def blocks(raw: Mapping[str, Any]) -> Blocks | None:
    """The blocks of a config.json; None where its weights are not in this form. CheckpointError for factors of another
    kind."""
    quantised = raw.get("quantization_config") or {}
    if quantised.get("quant_method") != METHOD:
        return None
    size = quantised.get("weight_block_size")
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise CheckpointError(
            f"quant_method 'fp8' with weight_block_size {size!r} is not supported, only two numbers such as [128, 128]"
        )
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"quant_method 'fp8' with fmt {quantised['fmt']!r} is not supported, only 'e4m3'")
    return Blocks(*size)


def missing(name: str) -> CheckpointError:
    """The error for a tensor in eight bits without factors."""
    return CheckpointError(f"{name} is in eight bits and has no {name}{SCALES}")


def inward(tensors: "Mapping[str, Tensor]", of: Blocks | None, dtype: "torch.dtype") -> "dict[str, Tensor]":
    """A folder's tensors as numbers of `dtype`, without factors. CheckpointError where one has none."""
    if of is None:
        return dict(tensors)
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) in tensors:
            continue
        if tensor.dtype.itemsize == 1:
            if name + SCALES not in tensors:
                raise missing(name)
            tensor = of.widened(tensor, tensors[name + SCALES], 0, dtype)
        out[name] = tensor
    return out
