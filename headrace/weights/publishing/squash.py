"""Squashing: combines several deltas into one, so that a receiver that lags reads each changed weight once.

The idea: the differences modulo 2^w of two steps add up to the difference over both. So deltas compose without the
weights: merge the positions, add the differences, drop the zeros. A weight that changes in each of eight steps costs at
most one symbol instead of eight: eight steps of a model of 0.9 M parameters squash to 0.40 of their bytes
(`python -m benchmarks.weight_squash --size 1m`). The work grows with the changes, not with the weights, so any node
that reads the stream can do it.

The chunks are published first, then the manifest of a delta from the older version to the newer one, then a
`WeightSquash` record that names the manifest; manifest and record are signed. The hashes are the chain's own, so a
receiver checks every block of a file that it builds from a squashed delta, and takes the longer path when one is
broken.

Trade-off: codes that need the base to be read (`full`, `context_delta`) do not compose. Then both versions are built
and compared.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from headrace.messages import subjects
from headrace.messages.weights import WeightHead, WeightManifest, WeightSquash
from headrace.weights import chain, state
from headrace.weights.codecs import codec, ulp_delta
from headrace.weights.codecs.chunks import Packer, frames
from headrace.weights.codecs.codec import CODECS, Frame, Place
from headrace.weights.codecs.ulp_delta import Positions
from headrace.weights.publishing import release
from headrace.weights.publishing.encoding import Encoding, Piece
from headrace.weights.publishing.release import Sink
from headrace.weights.receiving.staging import BrokenVersion, check_chunk
from headrace.weights.signing import Signer, Trust, digest, sealed
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import Bits, WeightError


class NotComposable(WeightError):
    """These deltas cannot be composed without the weights."""


async def span(
    source: chain.StreamSource, commit: WeightHead, count: int, trust: Trust | None = None
) -> list[WeightManifest]:
    """The manifests of the last `count` deltas up to a commit, oldest first; fewer where a full snapshot comes
    before."""
    deltas: list[WeightManifest] = []
    current = await chain.manifest(source, commit.run, commit.manifest_seq, trust)
    while current.base_version >= 0 and len(deltas) < count:
        deltas.append(current)
        current = await chain.manifest(source, commit.run, current.base_seq, trust)
    return deltas[::-1]


async def publish(
    bus: chain.StreamSource,
    sink: Sink,
    commit: WeightHead,
    *,
    count: int,
    name: str = "d8-zstd",
    signer: Signer | None = None,
    trust: Trust | None = None,
    fetch: chain.Fetch | None = None,
) -> WeightSquash:
    """Squash the last `count` deltas up to a commit and store the result. BrokenVersion for fewer than two deltas.
    fetch: as in `chain.build`, for deltas that do not compose."""
    deltas = await span(bus, commit, count, trust)
    if len(deltas) < 2:
        raise BrokenVersion(f"version {commit.version} follows {len(deltas)} deltas; expected at least 2 to squash")
    first, last = deltas[0], deltas[-1]
    base = await chain.manifest(bus, commit.run, first.base_seq, trust)
    begin = len(last.chunks)
    try:
        pieces, figures = await compose(bus, deltas, base, name)
        infos = await release.store(sink, iter(pieces), commit.run, last.version, first=begin)
        changed, wire = figures
    except NotComposable:
        with tempfile.TemporaryDirectory(prefix="headrace-squash-") as text:
            files = Path(text) / "base", Path(text) / "target"
            older = await chain.plan(bus, sealed(_commit_of(base, first.base_seq, commit), signer), trust=trust)
            await chain.build(bus, older, files[0], fetch=fetch)
            await chain.build(bus, chain.BuildPlan(tuple(deltas), files[0]), files[1])
            count_of_shards = 1 + max((info.shard for info in last.tensors), default=0)
            encoding = Encoding(Snapshot(files[1]), Snapshot(files[0]), name=name, shards=count_of_shards)
            infos = await release.upload(sink, encoding, commit.run, last.version, first=begin)
            changed, wire = encoding.changed, encoding.wire_bytes
    manifest = WeightManifest(
        run=commit.run,
        version=last.version,
        base_version=base.version,
        base_seq=first.base_seq,
        step=last.step,
        tensors=last.tensors,
        chunks=tuple(infos),
        block_hashes=last.block_hashes,
        state_hash=last.state_hash,
        base_hash=base.state_hash,
        parent=digest(base),
        raw_bytes=last.raw_bytes,
        wire_bytes=wire,
        changed=changed,
        elements=last.elements,
        precision=last.precision,
        source_hash=last.source_hash,
    )
    where = subjects.WEIGHT_MANIFEST.at(run=commit.run, version=last.version)
    seq = await sink.publish(where, sealed(manifest, signer))
    record = WeightSquash(
        run=commit.run,
        version=last.version,
        state_hash=last.state_hash,
        base_version=base.version,
        base_hash=base.state_hash,
        manifest_seq=seq,
        wire_bytes=wire,
    )
    record = sealed(record, signer)
    await sink.publish(subjects.WEIGHT_SQUASH.at(run=commit.run), record)
    return record


def _commit_of(manifest: WeightManifest, seq: int, later: WeightHead) -> WeightHead:
    """A head record for an intermediate version, to plan with; it is not published."""
    return WeightHead(
        run=manifest.run,
        version=manifest.version,
        manifest_seq=seq,
        state_hash=manifest.state_hash,
        full_version=later.full_version,
        full_seq=later.full_seq,
    )


async def compose(
    source: chain.StreamSource, deltas: Sequence[WeightManifest], base: WeightManifest, name: str = "d8-zstd"
) -> tuple[list[Piece], tuple[int, int]]:
    """The chunks of the sum of deltas as (shard, chunk), the number of changed elements, and the bytes of the chunks.

    base: the manifest of the version that the first delta is based on. NotComposable when a frame does not compose,
    BrokenVersion when a chunk is not what its manifest names.
    """
    last = deltas[-1]
    if CODECS[name].sparse != codec.SPARSE or any(delta.tensors != base.tensors for delta in deltas):
        raise NotComposable(f"expected a d8 codec and deltas over the same tensors to compose, got codec {name}")
    units = state.units(last.tensors)
    pieces: list[Piece] = []
    changed = 0
    for shard in sorted({info.shard for info in last.tensors}):
        packer = Packer()
        readers = [_Reader(source, delta, shard) for delta in deltas]
        for index, unit in enumerate(units):
            if last.tensors[unit[0].tensor].shard != shard:
                continue
            frames = [frame for reader in readers for frame in await reader.take(index)]
            if not frames:
                continue
            dtype = last.tensors[unit[0].tensor].dtype
            before, after = (state.unit_hash(unit, manifest.block_hashes) for manifest in (base, last))
            place, kind = Place(index, dtype, before, after), state.unsigned(dtype)
            size = sum(part.items for part in unit)
            for data, items in await asyncio.to_thread(_squashed, place, frames, kind, size, CODECS[name].method):
                changed += items
                chunk = packer.add(data)
                if chunk is not None:
                    pieces.append((shard, chunk))
        rest = packer.flush()
        if rest is not None:
            pieces.append((shard, rest))
    return pieces, (changed, sum(len(chunk) for _, chunk in pieces))


class _Reader:
    """Reads the frames of one delta's shard from the stream, in the order of units."""

    def __init__(self, source: chain.StreamSource, of: WeightManifest, shard: int):
        self._frames = self._read(source, of, shard)
        self._next: Frame | None = None
        self._ended = False

    @staticmethod
    async def _read(source: chain.StreamSource, of: WeightManifest, shard: int) -> AsyncIterator[Frame]:
        for info in of.chunks:
            if info.shard == shard:
                data = await chain.chunk(source, of, info)
                check_chunk(of, info, data)
                for frame in frames(data):
                    yield frame

    async def take(self, unit: int) -> list[Frame]:
        """The frames of a unit; empty when it did not change. Call it with ascending units."""
        out = []
        while not self._ended:
            if self._next is None:
                self._next = await anext(self._frames, None)
                self._ended = self._next is None
            if self._next is None or self._next.unit > unit:
                break
            if self._next.unit == unit:
                out.append(self._next)
            self._next = None
        return out


def _squashed(
    place: Place, frames: Sequence[Frame], kind: np.dtype[np.unsignedinteger], size: int, method: int
) -> list[tuple[bytes, int]]:
    """The encoded frames of the sum of a unit's frames, each with the number of elements that it changes."""
    at, differences = _sum(frames, kind)
    summed = codec.encode_differences(place, at, ulp_delta.zigzag(differences), size, method)
    return [(codec.to_bytes(frame), items) for frame, items in summed]


def _sum(frames: Sequence[Frame], kind: np.dtype[np.unsignedinteger]) -> tuple[Positions, Bits]:
    """Ascending positions and the sum of all differences at each, without zeros. NotComposable."""
    try:
        parts = [codec.differences(frame, kind) for frame in frames]
    except WeightError as error:
        raise NotComposable(str(error)) from None
    at = np.concatenate([part[0] for part in parts])
    difference = np.concatenate([part[1] for part in parts])
    order = np.argsort(at, kind="stable")
    at, difference = at[order], difference[order]
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    # The sum wraps around in the width of the weights, as the differences did.
    total = np.add.reduceat(difference, starts, dtype=kind)
    left = np.flatnonzero(total)
    return at[starts[left]], total[left]
