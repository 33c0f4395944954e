"""Staging: builds a version in a file while another one is served, and verifies it.

The idea: one unit (a block, or a run of small ones) at a time is in a buffer that fits the processor's cache: copied
from the base, changed by its frames, hashed, and written into a temporary snapshot file. Later manifests of a chain
read it back from there. The file gets the version's name only when every block's hash equals the manifest's, so a
partial file never has a version's name.

Checks: a chunk's sha256 before it is decoded; a frame's unit, and the unit hashes that it names, before it is applied;
then every block of the last version. Intermediate versions of a chain are not hashed: an error in one of them also
changes the last.

A node that needs some shards builds a file of only their tensors from only their chunks; every block in it is checked
against the same manifest.

Trade-off: a unit whose frames arrive scattered is read back each time; senders send them one after the other.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from headrace.messages.weights import ChunkInfo, WeightManifest
from headrace.weights import shards as sharding
from headrace.weights import state
from headrace.weights.codecs import codec
from headrace.weights.codecs.chunks import frames
from headrace.weights.snapshot import Draft, Snapshot
from headrace.weights.state import HASH_BYTES, Bits, Part, WeightError


class DamagedChunk(WeightError):
    """A chunk differs from its manifest; another attempt to fetch it may succeed."""


class BrokenVersion(WeightError):
    """A version cannot be built: its base, a frame or the version itself is broken."""


def check_manifest(manifest: WeightManifest) -> None:
    """Check a manifest for contradictions. BrokenVersion."""
    if any(side < 0 for info in manifest.tensors for side in info.shape):
        raise BrokenVersion(f"the manifest of version {manifest.version} has a tensor of negative size")
    if len(manifest.block_hashes) != sum(map(state.block_count, manifest.tensors)) * HASH_BYTES:
        raise BrokenVersion(
            f"the manifest of version {manifest.version} has another number of block hashes than its tensors have "
            f"blocks"
        )
    if manifest.detached and manifest.base_version >= 0:
        raise BrokenVersion(f"the manifest of version {manifest.version} is a delta and names an object")
    if state.root(manifest.tensors, manifest.block_hashes) != manifest.state_hash:
        raise BrokenVersion(f"the block hashes of version {manifest.version} do not give its state hash")


def check_chunk(manifest: WeightManifest, info: ChunkInfo, data: bytes) -> None:
    """Compare a chunk with its entry in the manifest. DamagedChunk."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != info.sha256:
        raise DamagedChunk(
            f"chunk {info.seq} of version {manifest.version} (sequence {info.stream_seq}) does not match its manifest: "
            f"sha256 {digest[:12]}, {len(data)} bytes, instead of {info.sha256[:12]}, {info.bytes} bytes"
        )


class StagedFile:
    """Builds one file by applying manifests in chain order. `finish` verifies it and gives it its name."""

    def __init__(
        self, path: str | Path, first: WeightManifest, base: Snapshot | None, shards: frozenset[int] | None = None
    ):
        """`first` is the first manifest that will be applied; its base is `base`, or None when it is a full snapshot.

        shards: the file holds the tensors of these shards; None means all. A base may hold more than it needs to.
        """
        check_manifest(first)
        if (base is None) != (first.base_version < 0):
            raise BrokenVersion(f"version {first.version} {'needs a base' if base is None else 'is a full snapshot'}")
        needed = sharding.chosen(first.tensors, shards)
        if not needed and first.tensors:
            raise BrokenVersion(f"version {first.version} has no shards {sorted(shards or ())}")
        if base is not None and not (base.tensors == needed if shards is None else set(base.tensors) >= set(needed)):
            raise BrokenVersion(f"{base.path.name} does not hold the tensors of version {first.version}")
        self._base, self._manifest, self._shards = base, first, shards
        self._draft = Draft(path, needed)
        self.path = self._draft.path
        self._units = state.units(first.tensors)
        here = [index for index, info in enumerate(first.tensors) if shards is None or info.shard in shards]
        self._at = {tensor: place for place, tensor in enumerate(here)}
        """Index of a tensor in the version to its index in the file; tensors of other shards are missing."""
        self._mine = [unit[0].tensor in self._at for unit in self._units]
        self._written = [False] * len(self._units)
        self._verified = [False] * len(self._units)
        self._open = -1
        """Index of the unit in the buffer."""
        sizes = (sum(part.items for part in unit) * self._kind(unit[0]).itemsize for unit in self._units)
        self._buffer = np.empty(max(sizes, default=0), np.uint8)
        self._hashes = b""
        """Block hashes of the manifest before the current one; empty for the first manifest."""
        self._done: set[tuple[int, int]] = set()
        self._last = True

    def _kind(self, part: Part) -> np.dtype[np.unsignedinteger]:
        return state.unsigned(self._manifest.tensors[part.tensor].dtype)

    def begin(self, manifest: WeightManifest) -> None:
        """Start to apply the next manifest of the chain. BrokenVersion when it is not a delta to the one before."""
        before = self._manifest
        if manifest is before:
            return
        check_manifest(manifest)
        self._complete()
        self._close()
        if manifest.base_hash != before.state_hash or manifest.tensors != before.tensors:
            raise BrokenVersion(f"version {manifest.version} is not a delta to version {before.version}")
        self._manifest, self._hashes, self._done = manifest, before.block_hashes, set()
        self._verified = [False] * len(self._units)

    def wants(self, info: ChunkInfo) -> bool:
        """Whether a chunk belongs to a shard that is built."""
        return self._shards is None or info.shard in self._shards

    def add(self, info: ChunkInfo, data: bytes, *, last: bool = True) -> None:
        """Apply a chunk of the current manifest. A chunk that was applied before is skipped.

        last: this manifest is the chain's last, so units are verified as they are written.
        DamagedChunk when the chunk is not what the manifest names; BrokenVersion when its frames do not fit.
        """
        if (info.shard, info.seq) in self._done:
            return
        check_chunk(self._manifest, info, data)
        self._last = last
        try:
            for frame in frames(data):
                self._apply(frame, info.shard)
        except BrokenVersion:
            raise
        except WeightError as error:
            raise BrokenVersion(f"chunk {info.seq} of version {self._manifest.version}: {error}") from None
        self._done.add((info.shard, info.seq))

    def _apply(self, frame: codec.Frame, shard: int) -> None:
        manifest = self._manifest
        if not 0 <= frame.unit < len(self._units):
            raise BrokenVersion(f"a frame for unit {frame.unit} of {len(self._units)}")
        unit = self._units[frame.unit]
        if manifest.tensors[unit[0].tensor].shard != shard or not self._mine[frame.unit]:
            raise BrokenVersion(f"a frame of {self._name(unit)} does not belong to shard {shard}")
        if frame.target != state.unit_hash(unit, manifest.block_hashes):
            raise BrokenVersion(f"a frame of {self._name(unit)} belongs to another version than {manifest.version}")
        if frame.base and self._hashes and frame.base != state.unit_hash(unit, self._hashes):
            raise BrokenVersion(f"a frame of {self._name(unit)} was made for another base than {manifest.base_version}")
        if self._open != frame.unit:
            self._close()
            self._load(frame.unit)
        view = self._view(frame.unit)
        base = None if manifest.base_version < 0 else view
        codec.apply(frame, base, view, manifest.tensors[unit[0].tensor].dtype)

    def _name(self, unit: Sequence[Part]) -> str:
        return self._manifest.tensors[unit[0].tensor].name

    def _view(self, index: int) -> Bits:
        """The buffer as the bits of a unit."""
        unit = self._units[index]
        kind = self._kind(unit[0])
        return self._buffer[: sum(part.items for part in unit) * kind.itemsize].view(kind)

    def _parts(self, index: int) -> Iterator[tuple[Part, Bits]]:
        """The blocks of a unit with their bits in the buffer."""
        view, at = self._view(index), 0
        for part in self._units[index]:
            yield part, view[at : at + part.items]
            at += part.items

    def _load(self, index: int) -> None:
        for part, view in self._parts(index):
            if self._written[index]:
                self._draft.read(self._at[part.tensor], part.start, view)
            elif self._base is not None:
                source = self._base.array(self._manifest.tensors[part.tensor])
                np.copyto(view, source[part.start : part.start + part.items])
            else:
                view.fill(0)
        self._open = index

    def _close(self) -> None:
        """Write the open unit; hash it while it is in the cache."""
        index, self._open = self._open, -1
        if index < 0:
            return
        good = self._last
        for part, view in self._parts(index):
            good = good and state.block_hash(view) == self._wanted(part)
            self._draft.write(self._at[part.tensor], part.start, view)
        self._verified[index], self._written[index] = good, True

    def _wanted(self, part: Part) -> bytes:
        return self._manifest.block_hashes[part.block * HASH_BYTES : (part.block + 1) * HASH_BYTES]

    def _verify(self, index: int) -> None:
        """Compare the blocks of a unit with the manifest. A unit without frames is also copied from the base into the
        file."""
        self._load(index)
        self._open = -1
        for part, view in self._parts(index):
            if state.block_hash(view) != self._wanted(part):
                raise BrokenVersion(
                    f"version {self._manifest.version}: block {part.block} ({self._manifest.tensors[part.tensor].name} "
                    f"from element {part.start}) does not hash to what the manifest says; its base or a frame is broken"
                )
            if not self._written[index]:
                self._draft.write(self._at[part.tensor], part.start, view)

    def _complete(self) -> None:
        wanted = (info for info in self._manifest.chunks if self.wants(info))
        missing = [info.seq for info in wanted if (info.shard, info.seq) not in self._done]
        if missing:
            raise BrokenVersion(f"version {self._manifest.version} lacks chunks {missing[:8]}")

    def finish(self) -> str:
        """Verify every block, give the file its name, return its state hash. BrokenVersion when a block is wrong: then
        there is no file."""
        self._complete()
        self._close()
        for index, verified in enumerate(self._verified):
            if self._mine[index] and not verified:
                self._verify(index)
        # No fsync: a file that a power loss damaged does not have its hash after the restart and is built again.
        self._draft.commit(durable=False)
        return sharding.state_hash(self._manifest, self._shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._draft.__exit__(kind, error, at)
