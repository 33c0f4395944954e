"""Encodes units as frames and applies frames: chooses the code of each unit.

The idea: for each unit (`state.units`: a block, or a run of small ones) count the changes and take the code with the
fewest bytes. An unchanged unit has no frame. Up to one change in ten a sparse code is smallest: ``ulp_delta``, or
``context_delta`` for links that cost more than cores. Where changes lie close together ``difference`` is tried as well,
and for small units every code. With more changes each code is tried on a sample of the unit, from its parts with the
fewest changes to those with the most. Codes with close estimates are all run, and the smallest result is taken, so a
wrong estimate costs little. Dense codes work on byte planes, because exponents repeat and mantissas do not:
``difference`` codes the zig-zag difference of all elements, ``full`` codes the new bits and needs no base.

Layout: a frame is a msgspec array of header and streams (`Frame`). Dense units and sparse ones with many changes are
cut into several frames, so that every frame fits a chunk and every chunk can be read alone. A frame names the unit's
hash before and after, so a frame of another version is refused before it is applied. Nothing is pickled.

Frames may be applied in place. With a separate base, applying a frame twice gives the same result as once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.weights.codecs import context_delta, loops, ulp_delta
from headrace.weights.codecs.loops import Positions
from headrace.weights.codecs.streams import Stream, pack, unpack
from headrace.weights.codecs.ulp_delta import planes, unplanes
from headrace.weights.state import Bits, WeightError

FULL, SPARSE, DIFFERENCE, CONTEXT = 0, 1, 2, 3
NAMES = {FULL: "full", SPARSE: "ulp_delta", DIFFERENCE: "difference", CONTEXT: "context_delta"}


CODECS = {"d8-zstd": SPARSE, "d10-zstd": CONTEXT}
"""The values of `[weights] codec` with the code of their sparse changes: d8 is the ULP delta, d10 the context delta."""

_ALWAYS_SPARSE = 0.1
_FRAME_BYTES = 800 << 10
"""Largest number of bytes of a sparse frame's streams before compression, without escapes, which add up to 16 KiB."""
_DENSE_BYTES = 256 << 10
"""Bytes of the unit that a dense frame covers."""
_TINY = 1 << 18
"""Elements of a unit that is too small for an estimate: every code is tried."""
_EVERY, _LOOK = 1 << 16, 64
_NOWHERE, _NOTHING = np.empty(0, np.int64), np.empty(0, np.uint8)
_SAMPLES, _SAMPLE = 16, 16384
"""Number of parts of a unit in the sample, and elements of each."""
_CONTEXT_GAIN = 0.6
"""Size of a context delta as a fraction of the ULP delta's, in the best case."""
_CLOSE = 1.03
"""Codes whose estimates are within this factor of the smallest are run on the whole unit."""


class Frame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A piece of one unit. Positions count items through its blocks, one after the other."""

    unit: int
    """Index into `state.units` of the manifest's tensors."""
    start: int
    count: int
    codec: int
    items: int
    """Elements that the streams hold: changed ones (ulp_delta, context_delta) or all of `count`."""
    base: bytes
    """`state.unit_hash` before, empty for `full`."""
    target: bytes
    """`state.unit_hash` after."""
    streams: tuple[Stream, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def to_bytes(frame: Frame) -> bytes:
    """A frame as bytes."""
    return _encoder.encode(frame)


def from_bytes(data: bytes) -> Frame:
    """The frame of these bytes. WeightError when they are not a frame."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WeightError(f"not a frame: {error}") from None


class Place(NamedTuple):
    """A unit's index, its dtype, and its hashes before (empty without a base) and after."""

    unit: int
    dtype: str
    base: bytes
    target: bytes


def encode(
    place: Place, base: Sequence[Bits] | None, target: Sequence[Bits], sparse: int
) -> Iterator[tuple[Frame, int]]:
    """The frames of a unit, each with the number of elements that it changes.

    base, target: the bits of the unit's blocks before and after; with base None the frames are a full snapshot's.
    Blocks are compared without a copy; only a dense unit of several blocks is copied into one array.
    """
    if base is None:
        yield from _dense(place, FULL, None, _joined(target))
        return
    size = sum(part.size for part in target)
    codes: tuple[int, ...] = (SPARSE,)
    if sparse == CONTEXT and place.dtype in context_delta.EXPONENTS:
        codes = (CONTEXT, SPARSE)
    changes: tuple[Positions, Bits, Bits] | None = None
    if size <= _TINY or not _looks_dense(base, target):
        changes = ulp_delta.changes(base, target)
        if not changes[0].size:
            return
    dense = changes is None or changes[0].size > _ALWAYS_SPARSE * size
    if dense or size <= _TINY or (changes and _clumped(changes[0])):
        base, target = [_joined(base)], [_joined(target)]
        codes = (*codes, DIFFERENCE, FULL) if dense or size <= _TINY else (*codes, DIFFERENCE)
        if dense and size > _TINY:
            codes = choose(base[0], target[0], codes, place.dtype)
    olds, news = base, target
    if changes is None and not {SPARSE, CONTEXT}.isdisjoint(codes):
        changes = ulp_delta.changes(olds, news)
    at, zigzagged = (_NOWHERE, _NOTHING)
    if changes is not None:
        at, zigzagged = changes[0], ulp_delta.zigzag_difference(changes[1], changes[2])

    def run(code: int) -> Iterator[tuple[Frame, int]]:
        if code in (SPARSE, CONTEXT):
            return _sparse(place, code, at, zigzagged, olds)
        return _dense(place, code, olds[0], news[0])

    if len(codes) == 1:
        yield from run(codes[0])
    else:
        yield from min((list(run(code)) for code in codes), key=_bytes_of)


def _looks_dense(base: Sequence[Bits], target: Sequence[Bits]) -> bool:
    """Whether more than a quarter of a unit changed, estimated from one element in a thousand."""
    seen = looked = 0
    for old, new in zip(base, target, strict=True):
        rows = old.size // _EVERY
        before, after = (part[: rows * _EVERY].reshape(rows, _EVERY)[:, :_LOOK] for part in (old, new))
        seen, looked = seen + int(np.count_nonzero(before != after)), looked + before.size
    return 4 * seen > looked


def _clumped(at: Positions) -> bool:
    """Whether more than a quarter of the changes lie where every second element changed."""
    near = np.diff(at[::32]) < 64
    return bool(np.count_nonzero(near) * 4 > near.size)


def choose(base: Bits, target: Bits, codes: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The codes whose estimated size is close to the smallest estimate.

    Parts are ranked by their number of changes, and the sample takes `_SAMPLES` parts evenly from that order; a unit
    that is not larger than the sample is tried whole.
    """
    parts = np.arange(-(-target.size // _SAMPLE))
    if parts.size > _SAMPLES:
        counts = np.add.reduceat(base != target, parts * _SAMPLE, dtype=np.int64)
        order = np.argsort(counts, kind="stable")
        parts = order[(np.arange(_SAMPLES) * 2 + 1) * parts.size // (2 * _SAMPLES)]
    sizes = {code: 0 for code in codes if code != CONTEXT}  # a part has too few changes for the classes of CONTEXT
    for first in (parts * _SAMPLE).tolist():
        old, new = base[first : first + _SAMPLE], target[first : first + _SAMPLE]
        where, before, after = ulp_delta.changes([old], [new])
        for code in sizes:
            if code == SPARSE:
                streams = _pack(SPARSE, where, ulp_delta.zigzag_difference(before, after), [old], dtype)
            else:
                content = ulp_delta.zigzag_difference(old, new) if code == DIFFERENCE else new
                streams = tuple(pack(plane) for plane in planes(content).reshape(content.itemsize, -1))
            sizes[code] += sum(len(stream.data) for stream in streams)
    limit = _CLOSE * min(sizes.values())
    # The size of CONTEXT is known only after a full run: run it whenever it might be smallest.
    hopeful = [CONTEXT] if CONTEXT in codes and _CONTEXT_GAIN * sizes[SPARSE] <= limit else []
    return (*hopeful, *(code for code in sizes if sizes[code] <= limit))


def _bytes_of(frames: Sequence[tuple[Frame, int]]) -> int:
    return sum(len(to_bytes(frame)) for frame, _ in frames)


def _joined(parts: Sequence[Bits]) -> Bits:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pack(codec: int, at: Positions, zigzagged: Bits, base: Sequence[Bits], dtype: str) -> tuple[Stream, ...]:
    """Streams of sparse changes; positions count from the first item of `base`."""
    if codec == SPARSE:
        return (pack(ulp_delta.gaps_of(at)), *ulp_delta.pack_values(zigzagged))
    return context_delta.encode(_joined(base), dtype, at, zigzagged)


def _sparse(
    place: Place, codec: int, at: Positions, zigzagged: Bits, base: Sequence[Bits]
) -> Iterator[tuple[Frame, int]]:
    size = sum(part.size for part in base)
    most = _FRAME_BYTES // (2 + (zigzagged.itemsize if zigzagged.itemsize > 1 else 0))
    if codec == CONTEXT and at.size > most:
        base = [_joined(base)]
    for first in range(0, at.size, most):
        part = slice(first, first + most)
        start = int(at[first]) if first else 0
        end = int(at[first + most]) if first + most < at.size else size
        span = base if (start, end) == (0, size) or codec == SPARSE else [base[0][start:end]]
        streams = _pack(codec, at[part] - start, zigzagged[part], span, place.dtype)
        items = len(zigzagged[part])
        yield _frame(place, start, end - start, codec, items, streams), items


def _dense(place: Place, codec: int, base: Bits | None, target: Bits) -> Iterator[tuple[Frame, int]]:
    step = _DENSE_BYTES // target.itemsize
    for start in range(0, target.size, step):
        new = target[start : start + step]
        old = None if base is None else base[start : start + step]
        changed = new.size if old is None else int(np.count_nonzero(old != new))
        content = ulp_delta.zigzag_difference(old, new) if old is not None and codec == DIFFERENCE else new
        yield _plane_frame(place, start, codec, content), changed


def _plane_frame(place: Place, start: int, codec: int, content: Bits) -> Frame:
    # A stream per plane: an incompressible plane is stored and has no effect on the entropy table of the others.
    streams = tuple(pack(plane) for plane in planes(content).reshape(content.itemsize, -1))
    return _frame(place, start, content.size, codec, content.size, streams)


def _frame(place: Place, start: int, count: int, codec: int, items: int, streams: tuple[Stream, ...]) -> Frame:
    return Frame(
        unit=place.unit,
        start=start,
        count=count,
        codec=codec,
        items=items,
        base=b"" if codec == FULL else place.base,
        target=place.target,
        streams=streams,
    )


def apply(frame: Frame, base: Bits | None, target: Bits, dtype: str) -> None:
    """Write a frame's changes into `target`. The old bits are read from `base`, which may be the same array.

    base, target: the unit's bits, of equal length; dtype: in safetensors' spelling. A sparse frame writes the changed
    elements alone, so the rest of `target` must hold the base's bits already. WeightError for a frame that does not
    fit or whose streams are damaged; `target` may then hold a part of it.
    """
    start, end = frame.start, frame.start + frame.count
    if not 0 <= start < end <= target.size:
        raise WeightError(f"a frame covers elements {start} to {end}, but its unit has {target.size}")
    part = target[start:end]
    if frame.codec == SPARSE and len(frame.streams) == 3:
        at, zigzagged = _read_sparse(frame, target.dtype)
        loops.add(_base(base, start, end), at, zigzagged, part)
    elif frame.codec == CONTEXT and dtype in context_delta.EXPONENTS and len(frame.streams) > 2:
        if not 0 < frame.items <= frame.count:
            raise WeightError(f"{frame.items} changes in a frame of {frame.count} elements")
        old = _base(base, start, end)
        at, zigzagged = context_delta.decode(old, dtype, frame.streams, frame.items)
        loops.add(old, at, zigzagged, part)
    elif frame.codec in (FULL, DIFFERENCE) and len(frame.streams) == target.itemsize and frame.items == frame.count:
        whole = _read_dense(frame, target.dtype)
        part[:] = whole if frame.codec == FULL else _base(base, start, end) + ulp_delta.unzigzag(whole)
    else:
        raise WeightError(f"a frame of codec {frame.codec} with {len(frame.streams)} streams cannot be read here")


def _read_sparse(frame: Frame, kind: np.dtype[np.unsignedinteger]) -> tuple[Positions, Bits]:
    if not 0 < frame.items <= frame.count:
        raise WeightError(f"{frame.items} changes in a frame of {frame.count} elements")
    gaps = unpack(frame.streams[0], frame.items + frame.count // loops.ESCAPE + 1)
    at = ulp_delta.positions_of(gaps)
    if at.size != frame.items or at[-1] >= frame.count:
        raise WeightError(
            f"a frame's gaps give {at.size} positions, expected {frame.items} positions below {frame.count}"
        )
    return at, ulp_delta.unpack_values(frame.streams[1], frame.streams[2], frame.items, kind)


def _read_dense(frame: Frame, kind: np.dtype[np.unsignedinteger]) -> Bits:
    content = np.concatenate([unpack(stream, frame.count) for stream in frame.streams])
    if content.size != frame.count * kind.itemsize:
        raise WeightError(f"a frame has {content.size} bytes, expected {frame.count} elements of {kind.itemsize} bytes")
    return unplanes(content, kind)


def _base(base: Bits | None, start: int, end: int) -> Bits:
    if base is None:
        raise WeightError("a full snapshot holds a frame that needs a base")
    return base[start:end]
