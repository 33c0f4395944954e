"""Torch tensors as weights: their description, their bits, their hash, and their file.

`state.py` and `snapshot.py` work on bits alone. A weight sender or receiver needs no more, so it starts without torch.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.messages.weights import TensorInfo
from headrace.weights.snapshot import Draft, Snapshot
from headrace.weights.state import Bits, WeightError, block_hashes, root, unsigned

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of `state.SIZES`."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def infos(tensors: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """The tensors of a state, sorted by name: the order of blocks and hashes."""
    out = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            expected = ", ".join(DTYPES)
            raise WeightError(f"{name}: dtype {tensor.dtype} cannot be published; expected one of {expected}")
        out.append(TensorInfo(name, _NAMES[tensor.dtype], tuple(tensor.shape)))
    return tuple(out)


def bits(tensor: Tensor) -> Bits:
    """A tensor's bit patterns, flat. Shares memory when the tensor is contiguous and on the CPU, else copies."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, unsigned(_NAMES[tensor.dtype]))
    raw: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return raw.view(unsigned(_NAMES[tensor.dtype]))


def state_bits(tensors: Mapping[str, Tensor]) -> list[Bits]:
    """The bit patterns of all tensors in name order."""
    return [bits(tensors[name]) for name in sorted(tensors)]


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """The state hash of named tensors, 32 hex digits: the same for the same bits, names, dtypes and shapes."""
    described = infos(tensors)
    return root(described, block_hashes(described, (bits(tensors[info.name]) for info in described)))


def write(path: str | Path, tensors: Mapping[str, Tensor]) -> str:
    """Write named tensors as one file, atomically. Returns their state hash. OSError on a full disk."""
    described, arrays = infos(tensors), state_bits(tensors)
    digest = root(described, block_hashes(described, arrays))
    with Draft(path, described, {"state_hash": digest}) as draft:
        for tensor, array in enumerate(arrays):
            draft.write(tensor, 0, array)
        draft.commit()
    return digest


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, in mapped memory: pages are read at first use, and writes stay in this
    process."""
    file = Snapshot(path)
    out: dict[str, Tensor] = {}
    for info in file.tensors:
        array = file.array(info)
        dtype = DTYPES[info.dtype]
        flat = torch.from_numpy(array.view(np.uint8)).view(dtype) if array.size else torch.empty(0, dtype=dtype)
        out[info.name] = flat.reshape(info.shape)
    return out
