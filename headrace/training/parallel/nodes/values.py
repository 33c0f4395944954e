"""The bytes of a value that one process of a group sends to others: MessagePack of a type that both sides name.

No byte of another process becomes code: the connections of a group cannot authenticate (docs/ranks.md).
"""

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.training.parallel.interface import GroupError
from headrace.weights.tensor_state import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Described(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The dtype (a name of `tensor_state.DTYPES`) and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Described":
        """Of a tensor."""
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape))

    def __post_init__(self) -> None:
        """ValueError for what no tensor has."""
        if self.dtype not in DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"expected a dtype of {', '.join(DTYPES)} and a shape, got {self.dtype} {self.shape}")

    def empty(self) -> Tensor:
        """A tensor like it on the CPU, with any values."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])


class _Whole(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor and its bytes."""

    about: Described
    data: bytes


def _encoded(value: Any) -> _Whole:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a value that a group sends, got {type(value).__name__}")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Whole(Described.of(value), flat.numpy().tobytes())


def _decoded(kind: type, value: Any) -> Tensor:
    if kind is not Tensor:
        raise TypeError(f"expected a type that a group sends, got {kind.__name__}")
    whole = msgspec.convert(value, _Whole)
    dtype = DTYPES[whole.about.dtype]
    if (size := math.prod(whole.about.shape) * dtype.itemsize) != len(whole.data):
        raise ValueError(f"expected {size} bytes of a tensor, got {len(whole.data)}")
    if not whole.data:
        return whole.about.empty()
    return torch.frombuffer(bytearray(whole.data), dtype=dtype).reshape(whole.about.shape)


def encode(value: object) -> bytes:
    """A value of messages, builtin types and tensors. TypeError for another one."""
    return msgspec.msgpack.encode(value, enc_hook=_encoded)


def decode(data: bytes, kind: Any) -> Any:
    """The value of this type; tensors are on the CPU. GroupError for other bytes."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decoded)
    except msgspec.DecodeError as error:
        raise GroupError(
            f"expected {getattr(kind, '__name__', kind)} from another process of the trainer's group, got "
            f"{len(data)} bytes: {error}; no other program may reach the group's ports ([trainer] rendezvous)"
        ) from None
