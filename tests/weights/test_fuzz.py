"""Corruption of every kind on chunks, manifests and bases is refused in words or harmless: never another state.

The small number runs always; `make fuzz` asks for 10,000 by the environment variable HEADRACE_FUZZ.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.messages.codec import UnknownType, decode, encode
from headrace.messages.weights import ChunkInfo, WeightManifest
from headrace.weights import snapshot
from headrace.weights.codec import CODECS
from headrace.weights.encoding import describe
from headrace.weights.shadow import Shadow
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from tests.weights.samples import Chain, model, step

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


@pytest.mark.parametrize("name", list(CODECS))
def test_no_damage_is_ever_served(tmp_path: Path, name: str) -> None:
    chain = Chain(tmp_path / "trainer", name)
    tensors = model()
    for version in range(3):
        chain.publish(tensors)
        tensors = step(tensors, version, 0.05)
    rng = np.random.default_rng(1)
    path = tmp_path / "out" / "v"
    refused = 0
    for _ in range(ROUNDS // len(CODECS)):
        version = int(rng.integers(0, 3))
        manifest, base = chain.manifests[version], chain.path(version - 1) if version else None
        chunks = {info.seq: chain.chunks[info.stream_seq] for info in manifest.chunks}
        other = chain.chunks[chain.manifests[(version + 1) % 3].chunks[0].stream_seq]
        damage = KINDS[rng.integers(len(KINDS))]
        try:
            match int(rng.integers(3)):
                case 0:  # a chunk, under a checksum that was made to fit: the frames themselves have to hold
                    seq = int(rng.integers(len(chunks)))
                    chunks[seq] = damage(rng, chunks[seq], other)
                    infos = [describe(data, 0, at, 0) for at, data in chunks.items()]
                    build(path, msgspec.structs.replace(manifest, chunks=tuple(infos)), base, chunks)
                case 1:  # the manifest as it lies in the stream
                    payload, headers = encode(manifest)
                    broken = decode(damage(rng, payload, encode(chain.manifests[2 - version])[0]), headers)
                    assert isinstance(broken, WeightManifest)
                    build(path, broken, base, chunks)
                case _:  # the base file on the disk
                    if base is None:
                        continue
                    (tmp_path / "base").write_bytes(damage(rng, base.read_bytes(), chain.path(2).read_bytes()))
                    build(path, manifest, tmp_path / "base", chunks)
        except (WeightError, UnknownType, MemoryError):
            refused += 1
            assert not list(path.parent.glob("*")) and not list(path.parent.glob(".*"))
            continue
        # It was let through: then it is one of the trainer's states, bit for bit.
        assert snapshot.file_hash(path) in {m.state_hash for m in chain.manifests}
        path.unlink()
    assert refused > ROUNDS // len(CODECS) // 2


def build(path: Path, manifest: WeightManifest, base: Path | None, chunks: dict[int, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with Shadow(path, manifest, Snapshot(base) if base and manifest.base_version >= 0 else None) as shadow:
        for info in manifest.chunks:
            shadow.add(info, chunks.get(info.seq, b""))
        shadow.finish()


def test_a_chunk_info_names_what_it_describes() -> None:
    assert describe(b"abc", 0, 3, 9) == ChunkInfo(
        shard=0,
        seq=3,
        stream_seq=9,
        bytes=3,
        sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    )
