"""The base of every message: a frozen struct, a type name with a version, and arrays as bytes.

Arrays travel as little-endian bytes with dtype and shape: encoding costs a memcpy, where a list of numbers costs twenty
times that (measured: 8 us against 157 us for 32 k tokens). This folder imports neither numpy nor torch; a consumer
wraps `Array.data` with `numpy.frombuffer` or `torch.frombuffer`.
"""

import array
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A count, an index or a sequence. The range is checked when a message is read, not when it is made."""
Version = Annotated[int, Meta(ge=-1, le=2**53)]
"""A policy version, -1 for none."""
Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A duration that may reach a timer. Neither NaN nor infinity is read here, nor in the next three types."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, Meta(ge=0.0, le=1e30)]
"""A measured number that is not negative, or a moment in seconds since 1970."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
LONGEST_TOKEN = 200
"""Characters of a subject's token; nats-server closes a connection that publishes on a subject of 4 KiB."""
Token = Annotated[str, Meta(pattern=r"^[a-z0-9_-]+\Z", max_length=LONGEST_TOKEN)]
"""One token of a subject."""
Name = Annotated[str, Meta(pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)*\Z", max_length=200)]
"""The name of a group or trajectory: legal at the end of a subject. Groups of users are ``<user hash>.<id>``."""

# numpy dtype strings of arrays in messages, with the type code of the standard library's `array` where there is one.
_CODES = {"|u1": "B", "<u2": "H", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message between actors. A reader ignores unknown fields."""

    type_name: ClassVar[str] = ""
    type_version: ClassVar[int] = 1


class Array(msgspec.Struct, frozen=True):
    """A dense array: `data` is little-endian and C-contiguous.

    dtype is a numpy dtype string such as ``<i4``; shape counts elements. `tolist` is for small one-dimensional
    arrays; anything larger is wrapped by its consumer.
    """

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise ValueError(f"array of {self.dtype[:20]!r}: expected a dtype among {', '.join(_CODES)}")
        count = 1
        for side in self.shape:
            count *= side
        width = int(self.dtype[2:])
        if count * width != len(self.data):
            raise ValueError(
                f"array of {self.dtype}{list(self.shape)} needs {count * width} bytes, got {len(self.data)}"
            )

    @classmethod
    def of(cls, values: Iterable[int] | Iterable[float], dtype: str, shape: Sequence[int] | None = None) -> "Array":
        """Pack numbers; `shape` defaults to one dimension. OverflowError when a value does not fit the dtype."""
        packed = array.array(_CODES[dtype], values)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(dtype, tuple(shape) if shape is not None else (len(packed),), packed.tobytes())

    def tolist(self) -> list[int] | list[float]:
        """The numbers in C order, without the shape."""
        values = array.array(_CODES[self.dtype])
        values.frombytes(self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


TYPES: dict[str, type[Message]] = {}
"""Every message type by name; filled by `message` when `headrace.messages` is imported."""

M = TypeVar("M", bound=type[Message])
S = TypeVar("S", bound=msgspec.Struct)
OLDER: dict[tuple[str, int], tuple[type[msgspec.Struct], Callable[[Any], Message]]] = {}
"""Name and version to the struct and the upgrade that read an older version of a message."""


def message(name: str, version: int = 1) -> Callable[[M], M]:
    """Register a struct under its wire name; the ``Hr-Type`` header is ``name/version``."""

    def register(cls: M) -> M:
        if name in TYPES:
            raise ValueError(f"message type {name!r} is defined twice")
        cls.type_name, cls.type_version = name, version
        TYPES[name] = cls
        return cls

    return register


def older(cls: type[Message], version: int, was: type[S], upgrade: Callable[[S], Message]) -> None:
    """Keep reading an older version of a message: `was` is its struct, `upgrade` turns it into the current one.

    An older version without an entry is read as the current struct, so a type whose version alone was raised needs no
    entry.
    """
    if not 0 < version < cls.type_version:
        raise ValueError(f"{cls.type_name}/{version} is not older than {cls.type_name}/{cls.type_version}")
    OLDER[cls.type_name, version] = was, upgrade
