"""One version on its way out: chunks from two mapped snapshots, unit by unit, and the manifest that commits them.

The idea: chunks come out as a generator, so that a sender publishes the first while the next is made, and memory stays
at a unit. Encoding is deterministic: the same two snapshots give the same chunks, so a sender that died can publish
them again and the stream's de-duplication drops what was there.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence

import msgspec

from headrace.messages.weights import ChunkInfo, WeightManifest
from headrace.weights import codec, state
from headrace.weights.chunks import Packer
from headrace.weights.codec import CODECS
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import HASH_BYTES, Bits, WeightError

_manifests = msgspec.msgpack.Encoder()


def digest(manifest: WeightManifest) -> str:
    """sha256 of a manifest: what the next manifest names as its parent."""
    return hashlib.sha256(_manifests.encode(manifest)).hexdigest()


class Encoding:
    """A target snapshot as a delta to a base, or, without a base, as an anchor."""

    def __init__(self, target: Snapshot, base: Snapshot | None, *, name: str = "d8-zstd", base_hashes: bytes = b""):
        """`base_hashes` are the base's slab hashes where they are known already; otherwise they are taken.

        WeightError for an unknown codec, and when base and target do not hold the same tensors.
        """
        if name not in CODECS:
            raise WeightError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
        if base is not None and base.tensors != target.tensors:
            raise WeightError(
                f"{target.path.name} does not hold the tensors of {base.path.name}: there is no delta between them"
            )
        self.target, self.base = target, base
        self.tensors = target.tensors
        self._recipe = CODECS[name]
        self._base_hashes = base_hashes or (base.hashes() if base is not None else b"")
        self.slab_hashes = b""
        self.changed = self.wire_bytes = 0
        self.elements = sum(state.elements(info) for info in self.tensors)
        self.raw_bytes = sum(state.nbytes(info) for info in self.tensors)
        self.seconds = 0.0
        """Processor time of this thread spent on comparing, coding and hashing."""

    def chunks(self) -> Iterator[bytes]:
        """The chunks in order. Afterwards the figures and `slab_hashes` are final."""
        packer = Packer()
        self.changed = self.wire_bytes = 0
        self.seconds = 0.0
        since = time.thread_time()
        for frame, changed in self._frames():
            self.changed += changed
            chunk = packer.add(codec.to_bytes(frame))
            if chunk is not None:
                self.wire_bytes += len(chunk)
                self.seconds += time.thread_time() - since
                yield chunk
                since = time.thread_time()
        chunk = packer.flush()
        self.wire_bytes += len(chunk or b"")
        self.seconds += time.thread_time() - since
        if chunk is not None:
            yield chunk

    def _frames(self) -> Iterator[tuple[codec.Frame, int]]:
        units = state.units(self.tensors)
        hashes = bytearray(HASH_BYTES * sum(len(unit) for unit in units))
        self.slab_hashes = b""
        for index, unit in enumerate(units):
            kind, new = self.tensors[unit[0].tensor].dtype, self._slabs(self.target, unit)
            for part, bits in zip(unit, new, strict=True):
                hashes[part.slab * HASH_BYTES : (part.slab + 1) * HASH_BYTES] = state.slab_hash(bits)
            after = state.unit_hash(unit, hashes)
            if self.base is None:
                yield from codec.encode(codec.Place(index, kind, b"", after), None, new, self._recipe)
                continue
            before = state.unit_hash(unit, self._base_hashes)
            if before != after:
                old = self._slabs(self.base, unit)
                yield from codec.encode(codec.Place(index, kind, before, after), old, new, self._recipe)
        self.slab_hashes = bytes(hashes)

    def _slabs(self, of: Snapshot, unit: Sequence[state.Part]) -> list[Bits]:
        arrays = (of.array(self.tensors[part.tensor]) for part in unit)
        return [array[part.start : part.start + part.items] for part, array in zip(unit, arrays, strict=True)]

    @property
    def state_hash(self) -> str:
        """The target's state hash, once `chunks` has run."""
        return state.root(self.tensors, self.slab_hashes)

    def manifest(
        self,
        run: str,
        version: int,
        chunks: Sequence[ChunkInfo],
        *,
        base: WeightManifest | None,
        base_seq: int = 0,
        step: int = 0,
        learning_rate: float = 0.0,
    ) -> WeightManifest:
        """The manifest, once all chunks lie in the stream. `base` is None for an anchor."""
        if (base is None) != (self.base is None):
            raise WeightError("a delta's manifest names its base, an anchor's none")
        return WeightManifest(
            run=run,
            version=version,
            base_version=-1 if base is None else base.version,
            base_seq=base_seq,
            step=step,
            tensors=self.tensors,
            chunks=tuple(chunks),
            slab_hashes=self.slab_hashes,
            state_hash=self.state_hash,
            base_hash="" if base is None else base.state_hash,
            parent="" if base is None else digest(base),
            raw_bytes=self.raw_bytes,
            wire_bytes=self.wire_bytes,
            changed=self.changed,
            elements=self.elements,
            learning_rate=learning_rate,
            encode_s=self.seconds,
        )


def describe(data: bytes, shard: int, seq: int, stream_seq: int) -> ChunkInfo:
    """What a manifest says about a chunk that lies in the stream at `stream_seq`."""
    return ChunkInfo(
        shard=shard, seq=seq, stream_seq=stream_seq, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
