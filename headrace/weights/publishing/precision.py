"""Published precision: the sender rounds the trainer's weights once to the bytes that all engines serve.

The idea: if every receiver quantised for itself, two receivers that round differently would serve two models, and the
published bytes would not be the served ones. So the sender rounds, deltas are between rounded versions (in MXFP8 ten
times fewer bytes change than in bf16: measured), and the state hash is that of the served bytes.

- ``bf16``: every floating tensor rounded to nearest, ties to even.
- ``mxfp8``: OCP microscaling (OCP MX specification 1.0): e4m3 elements in blocks of 32 along the last dimension, one
  power-of-two scale each (e8m0, biased by 127, as uint8 in ``<name>_scale``), by `kernels.mxfp8`, with which the
  embedded engine reads them back. Embeddings, output head, routers, norms, adapters and tensors without whole blocks
  stay bf16.

Under ``bf16`` a float32 trainer holds rounded weights itself (`training.served.precision`), so the rounding here
changes no number. Trade-off of ``mxfp8``: the trainer's own weights are not the served ones, so re-scoring measures the
rounding too.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels import mxfp8
from headrace.weights import tensor_state
from headrace.weights.state import WeightError

BF16, MXFP8 = "bf16", "mxfp8"
SCALE = "_scale"
KEPT = ("*embed*", "*norm*", "*lm_head*", "*.mlp.gate.weight", "*router*", "*.lora_?.weight")
"""Tensors that stay bf16 under mxfp8."""


def publish(source: str | Path, path: str | Path, precision: str) -> str:
    """Write the weights of the file `source` in a precision to `path`. Returns the state hash of the new file.
    WeightError for another precision than bf16 and mxfp8."""
    if precision not in (BF16, MXFP8):
        raise WeightError(f"cannot round to precision {precision!r}; expected {BF16} or {MXFP8}")
    return tensor_state.write(path, dict(_served(tensor_state.read(source), precision)))


def _served(tensors: Mapping[str, Tensor], precision: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            yield name, tensor
        elif precision == MXFP8 and blocks_of(name, tensor):
            elements, scales = quantise(tensor)
            yield name, elements
            yield name + SCALE, scales
        else:
            yield name, tensor.bfloat16()


def blocks_of(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is quantised in blocks under mxfp8."""
    whole = tensor.dim() >= 2 and tensor.shape[-1] > 0 and tensor.shape[-1] % mxfp8.BLOCK == 0
    return whole and tensor.numel() > 0 and not any(fnmatchcase(name, pattern) for pattern in KEPT)


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A floating tensor [..., K] as (elements e4m3 [..., K], scales uint8 [..., K / 32]).

    value = element * 2^(scale - 127). A block that holds NaN or infinity has scale 255, which means NaN.
    """
    return mxfp8.quantise(tensor.detach())


def restore(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of published tensors, by name: blocks become bf16, exactly for values above 2^-133."""
    out = {}
    for name, tensor in tensors.items():
        scales = tensors.get(name + SCALE)
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        if scales is None or tensor.dtype != torch.float8_e4m3fn:
            out[name] = tensor
            continue
        out[name] = mxfp8.dequantise(tensor, scales, torch.bfloat16)
    return out
