"""Corruption of every kind on chunks, manifests, heads, bases and staged files is refused in words or harmless: never
another state. Flipped, overwritten, dropped, repeated, truncated, spliced, swapped; reordered, doubled, from another
version, for another base; without a signature, or with that of a stranger, of another message, or of an earlier record.

The small number runs always; `make fuzz` asks for 10,000 by the environment variable HEADRACE_FUZZ.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.messages.codec import UnreadableMessage, decode, encode
from headrace.messages.weights import ChunkInfo, WeightHead, WeightManifest
from headrace.weights import snapshot
from headrace.weights.codecs.chunks import Packer, frames
from headrace.weights.codecs.codec import CODECS, to_bytes
from headrace.weights.heads import Heads
from headrace.weights.publishing.encoding import describe
from headrace.weights.receiving.staging import StagedFile
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.signing import canonical, sealed
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from tests.support.keys import PUBLISHER, STRANGER, trust
from tests.support.weights import Chain, model, step

ROUNDS = int(os.environ.get("HEADRACE_FUZZ", "400"))

Damage = Callable[[np.random.Generator, bytes, bytes], bytes]


def flip(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for at in rng.integers(0, len(out), rng.integers(1, 4)):
        out[at] ^= 1 << int(rng.integers(8))
    return bytes(out)


def overwrite(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
    return data[:at] + rng.bytes(min(length, len(data) - at)) + data[at + length :]


def drop(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 200))
    return data[:at] + data[at + length :]


def repeat(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at = int(rng.integers(len(data)))
    return data[:at] + data[max(0, at - int(rng.integers(1, 200))) :]


def truncate(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return data[: int(rng.integers(len(data)))]


def splice(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at = int(rng.integers(len(data)))
    return data[:at] + other[at:]


def foreign(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return other


KINDS: list[Damage] = [flip, overwrite, drop, repeat, truncate, splice, foreign]


class Attack:
    """A signed chain on disk, and one corruption of it after the other."""

    def __init__(self, folder: Path, name: str):
        self.rng = np.random.default_rng(1)
        self.folder, self.path = folder, folder / "out" / "v"
        self.chain = Chain(folder / "trainer", name)
        tensors = model(wide=15_000)
        for version in range(4):
            self.chain.publish(tensors)
            tensors = step(tensors, version, 0.05)
        self.states = {manifest.state_hash for manifest in self.chain.manifests}
        self.signed = [sealed(manifest, PUBLISHER) for manifest in self.chain.manifests]
        self.heads = [
            sealed(
                WeightHead(
                    run="r1", version=at, manifest_seq=10 * at + 5, state_hash=manifest.state_hash, full_version=0,
                    full_seq=5, after=max(0, 10 * at - 4),
                ),
                PUBLISHER,
            )
            for at, manifest in enumerate(self.chain.manifests)
        ]  # fmt: skip
        self.book = Heads("r1", trust())
        for at, head in enumerate(self.heads):
            self.book.take(Stored(10 * at + 6, head))

    def draw(self, count: int) -> int:
        return int(self.rng.integers(count))

    def damage(self, data: bytes, other: bytes) -> bytes:
        return KINDS[self.draw(len(KINDS))](self.rng, data, other)

    def bytes_of(self, manifest: WeightManifest) -> dict[int, bytes]:
        return {info.seq: self.chain.chunks[info.stream_seq] for info in manifest.chunks}

    def base(self, version: int) -> Path | None:
        return self.chain.path(version - 1) if version else None

    def chunk(self, version: int) -> None:
        """A chunk under a checksum that was made to fit: the frames themselves have to hold."""
        manifest = self.chain.manifests[version]
        chunks = self.bytes_of(manifest)
        other = self.chain.chunks[self.chain.manifests[(version + 1) % 4].chunks[0].stream_seq]
        seq = self.draw(len(chunks))
        chunks[seq] = self.damage(chunks[seq], other)
        infos = [describe(data, 0, at, 0) for at, data in chunks.items()]
        build(self.path, msgspec.structs.replace(manifest, chunks=tuple(infos)), self.base(version), chunks)

    def order(self, version: int) -> None:
        """The right chunks in another order, some twice, perhaps one too few: of the full snapshot, which has
        several."""
        version = 0
        manifest = self.chain.manifests[version]
        chunks = self.bytes_of(manifest)
        infos = [manifest.chunks[at] for at in self.rng.integers(0, len(chunks), len(chunks) + 2)]
        base = self.base(version)
        self.path.parent.mkdir(exist_ok=True)
        with StagedFile(self.path, manifest, Snapshot(base) if base else None) as staged:
            for info in infos:
                staged.add(info, chunks[info.seq])
            staged.finish()

    def swap(self, version: int) -> None:
        """Chunks of one version under the manifest of another, and frames of two versions in one chunk."""
        manifest = self.chain.manifests[version]
        mine, other = (self.bytes_of(self.chain.manifests[at]) for at in (version, (version + 1 + self.draw(3)) % 4))
        both = [*frames(mine[0]), *frames(other[0])]
        self.rng.shuffle(both)
        packer = Packer()
        packed = [chunk for frame in both if (chunk := packer.add(to_bytes(frame)))] + [packer.flush() or b""]
        chunks = dict(enumerate(packed)) if self.draw(2) else other
        infos = [describe(data, 0, at, 0) for at, data in chunks.items()]
        build(self.path, msgspec.structs.replace(manifest, chunks=tuple(infos)), self.base(version), chunks)

    def manifest(self, version: int) -> None:
        """The manifest as it lies in the stream, read by someone who checks no signature."""
        payload, headers = encode(self.chain.manifests[version])
        other = encode(self.chain.manifests[3 - version])[0]
        broken = decode(self.damage(payload, other), headers)
        assert isinstance(broken, WeightManifest)
        build(self.path, broken, self.base(version), self.bytes_of(self.chain.manifests[version]))

    def signature(self, version: int) -> None:
        """Manifests and heads that are not what the publisher signed: nothing that differs gets past."""
        forged: Any
        truth: Any = (self.signed, self.heads)[self.draw(2)][version]
        both: list[WeightManifest | WeightHead] = [*self.signed, *self.heads]
        payload, headers = encode(truth)
        match self.draw(4):
            case 0:
                forged = decode(self.damage(payload, encode(self.signed[3 - version])[0]), headers)
            case 1:
                forged = sealed(truth, STRANGER)
                forged = msgspec.structs.replace(forged, signer=PUBLISHER.public) if self.draw(2) else forged
            case 2:
                forged = msgspec.structs.replace(truth, version=truth.version + 1 + self.draw(9))
            case _:
                stolen = both[self.draw(8)].signature
                forged = msgspec.structs.replace(truth, signature=stolen, signer=PUBLISHER.public)
        assert isinstance(forged, WeightManifest | WeightHead)
        trust().check(forged)
        # A complete message that is inserted at another place has a valid signature: only its place shows the error.
        true = {canonical(message) for message in both}
        assert canonical(forged) in true, "a signature held for other words"

    def head(self, version: int) -> None:
        """Damaged heads, and valid heads at another place."""
        payload, headers = encode(self.heads[version])
        other = encode(self.heads[3 - version])[0]
        if self.draw(2):
            self.book.take(Stored(100, self.heads[version]))
        else:
            damaged_head = decode(self.damage(payload, other), headers)
            self.book.take(Stored(100, damaged_head))
        raise AssertionError("a head counted a second time")

    def wrong_base(self, version: int) -> None:
        """Another version's file, or a damaged one, where the base should be."""
        manifest = self.chain.manifests[max(1, version)]
        base = self.chain.path(self.draw(4))
        if self.draw(2):
            (self.folder / "base").write_bytes(self.damage(base.read_bytes(), self.chain.path(2).read_bytes()))
            base = self.folder / "base"
        build(self.path, manifest, base, self.bytes_of(manifest))

    def staged(self, version: int) -> None:
        """A file on the store of a node that starts again: what is damaged is not found under its hash."""
        store = SnapshotStore(self.folder / "store")
        store.folder.mkdir(exist_ok=True)
        data = self.chain.path(version).read_bytes()
        broken = self.damage(data, self.chain.path(3 - version).read_bytes())
        store.path(version).write_bytes(broken)
        store.scan()
        snapshot_file = store.find(version, self.chain.manifests[version].state_hash)
        if snapshot_file is None:
            raise WeightError("not on the store")
        assert snapshot.file_hash(snapshot_file) == self.chain.manifests[version].state_hash


class Stored:
    """A message at a sequence."""

    def __init__(self, seq: int, message: object):
        self.seq, self.message = seq, message


ATTACKS = (
    Attack.chunk, Attack.order, Attack.swap, Attack.manifest, Attack.signature, Attack.head, Attack.wrong_base,
    Attack.staged,
)  # fmt: skip


@pytest.mark.parametrize("name", list(CODECS))
def test_no_damage_is_ever_served(tmp_path: Path, name: str) -> None:
    attack = Attack(tmp_path, name)
    refused = dict.fromkeys(ATTACKS, 0)
    rounds = -(-ROUNDS // len(CODECS))
    harmless = 0
    for number in range(rounds):
        kind = ATTACKS[number % len(ATTACKS)]
        try:
            kind(attack, attack.draw(4))
        except (WeightError, UnreadableMessage, MemoryError) as error:
            refused[kind] += 1
            assert str(error) or isinstance(error, MemoryError)
            assert not list(attack.path.parent.glob("*"))
            assert not list(attack.path.parent.glob(".*"))
            continue
        if attack.path.exists():
            # It was let through: then it is one of the trainer's states, bit for bit.
            assert snapshot.file_hash(attack.path) in attack.states
            attack.path.unlink()
        harmless += 1
    refusals = {attack.__name__: count for attack, count in refused.items()}
    print(
        json.dumps({"codec": name, "corruptions": rounds, "refused": refusals, "harmless": harmless, "served_wrong": 0})
    )
    # Some damage is harmless (a chunk that comes twice, a hint in a file's header); most is not.
    assert sum(refused.values()) > rounds // 2
    assert all(refused.values()), refused


def build(path: Path, manifest: WeightManifest, base: Path | None, chunks: dict[int, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with StagedFile(path, manifest, Snapshot(base) if base and manifest.base_version >= 0 else None) as staged:
        for info in manifest.chunks:
            staged.add(info, chunks.get(info.seq, b""))
        staged.finish()


def test_a_chunk_info_names_what_it_describes() -> None:
    assert describe(b"abc", 0, 3, 9) == ChunkInfo(
        shard=0,
        seq=3,
        stream_seq=9,
        bytes=3,
        sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    )
