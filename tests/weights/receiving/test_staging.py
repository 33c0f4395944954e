"""A version is built, verified and named, or refused: never there in part."""

import itertools
from pathlib import Path

import msgspec
import pytest

from headrace.messages.weights import WeightManifest
from headrace.weights import signing, snapshot, tensor_state
from headrace.weights.codecs.chunks import Packer, frames
from headrace.weights.codecs.codec import to_bytes
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.receiving.staging import BrokenVersion, DamagedChunk, StagedFile
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from tests.support.weights import Chain, model, step


def build(chain: Chain, manifests: list[WeightManifest], base: Path | None, path: Path) -> str:
    with StagedFile(path, manifests[0], Snapshot(base) if base else None) as staged:
        for manifest in manifests:
            staged.begin(manifest)
            for info in manifest.chunks:
                staged.add(info, chain.chunks[info.stream_seq], last=manifest is manifests[-1])
        return staged.finish()


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    out = Chain(tmp_path / "trainer")
    tensors = model()
    out.publish(tensors)
    for version in range(1, 5):
        tensors = step(tensors, version)
        out.publish(tensors)
    return out


@pytest.mark.parametrize("codec", ["d8-zstd", "d10-zstd"])
def test_a_full_snapshot_and_each_delta_give_the_trainers_file(tmp_path: Path, codec: str) -> None:
    chain = Chain(tmp_path / "trainer", codec)
    tensors, before = model(), None
    for version in range(4):
        manifest = chain.publish(tensors)
        path = tmp_path / f"{version}.safetensors"
        assert build(chain, [manifest], before, path) == snapshot.file_hash(path) == manifest.state_hash
        assert manifest.state_hash == snapshot.file_hash(chain.path(version))
        if version:
            assert manifest.wire_bytes * 20 < manifest.raw_bytes
        before, tensors = path, step(tensors, version)


def test_a_late_joiner_goes_from_the_full_snapshot_through_the_chain(tmp_path: Path, chain: Chain) -> None:
    path = tmp_path / "late.safetensors"
    assert build(chain, chain.manifests, None, path) == snapshot.file_hash(chain.path(4))
    assert build(chain, chain.manifests[3:], chain.path(2), path) == snapshot.file_hash(chain.path(4))


def test_old_bytes_under_a_new_number_are_an_empty_delta(tmp_path: Path, chain: Chain) -> None:
    manifest = chain.publish(chain.states[-1])
    assert (manifest.chunks, manifest.changed, manifest.wire_bytes) == ((), 0, 0)
    path = tmp_path / "v"
    assert build(chain, [manifest], chain.path(4), path) == chain.manifests[4].state_hash == snapshot.file_hash(path)


def test_other_tensors_are_no_delta(tmp_path: Path, chain: Chain) -> None:
    with pytest.raises(WeightError, match="no delta between"):
        chain.publish(model(wide=301))


def test_a_damaged_chunk_is_named_and_may_be_repaired(tmp_path: Path, chain: Chain) -> None:
    manifest = chain.manifests[1]
    (info,) = manifest.chunks
    data = chain.chunks[info.stream_seq]
    with StagedFile(tmp_path / "v", manifest, Snapshot(chain.path(0))) as staged:
        for at in (0, 5, len(data) // 2, len(data) - 1):
            broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            with pytest.raises(DamagedChunk, match=rf"chunk 0 of version 1 \(sequence {info.stream_seq}\)"):
                staged.add(info, broken)
        with pytest.raises(BrokenVersion, match="lacks chunks"):
            staged.finish()
        staged.add(info, data, last=True)
        staged.add(info, data, last=True)
        assert staged.finish() == manifest.state_hash


def refusal(chain: Chain, manifest: WeightManifest, base: Path | None, path: Path) -> str:
    with pytest.raises(BrokenVersion) as caught:
        build(chain, [manifest], base, path)
    assert not list(path.parent.glob("*v*")), "nothing is left, under no name"
    return str(caught.value)


def test_the_wrong_base_is_refused(tmp_path: Path, chain: Chain) -> None:
    path = tmp_path / "out" / "v"
    assert "its base or a frame is broken" in refusal(chain, chain.manifests[3], chain.path(1), path)
    assert "is a full snapshot" in refusal(chain, chain.manifests[0], chain.path(1), path)
    assert "needs a base" in refusal(chain, chain.manifests[3], None, path)


def test_a_base_with_a_flipped_bit_where_nothing_changes_is_refused(tmp_path: Path, chain: Chain) -> None:
    tensors = dict(chain.states[0])
    tensors["layers.0.norm"] = tensors["layers.0.norm"].clone()
    tensors["layers.0.norm"][3] = 2.0
    tensor_state.write(tmp_path / "bad", tensors)
    assert "layers.0.norm" in refusal(chain, chain.manifests[1], tmp_path / "bad", tmp_path / "out" / "v")


def test_a_chunk_of_another_version_is_refused_even_under_a_right_sum(tmp_path: Path, chain: Chain) -> None:
    (first_chunk,), (other,) = chain.manifests[1].chunks, chain.manifests[2].chunks
    forged = msgspec.structs.replace(other, seq=first_chunk.seq)
    manifest = msgspec.structs.replace(chain.manifests[1], chunks=(forged,))
    assert "another version" in refusal(chain, manifest, chain.path(0), tmp_path / "out" / "v")


def test_a_dropped_frame_is_refused(tmp_path: Path, chain: Chain) -> None:
    (info,) = chain.manifests[1].chunks
    packer = Packer()
    for frame in list(frames(chain.chunks[info.stream_seq]))[1:]:
        packer.add(to_bytes(frame))
    data = packer.flush()
    assert data is not None
    chain.chunks[info.stream_seq] = data
    manifest = msgspec.structs.replace(chain.manifests[1], chunks=(describe(data, 0, 0, info.stream_seq),))
    assert "embed" in refusal(chain, manifest, chain.path(0), tmp_path / "out" / "v")


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, chain: Chain) -> None:
    good, path = chain.manifests[1], tmp_path / "out" / "v"
    flipped = bytes([good.block_hashes[0] ^ 1]) + good.block_hashes[1:]
    huge = tuple(msgspec.structs.replace(info, shape=(1 << 60, 1 << 20)) for info in good.tensors)
    negative = tuple(msgspec.structs.replace(info, shape=(-1, -64)) for info in good.tensors)
    for tensors in (huge, negative):
        refusal(chain, msgspec.structs.replace(good, tensors=tensors), chain.path(0), path)
    for change in ({"block_hashes": flipped}, {"block_hashes": good.block_hashes[16:]}, {"state_hash": "0" * 32}):
        refusal(chain, msgspec.structs.replace(good, **change), chain.path(0), path)


def test_a_chain_with_a_hole_is_refused(tmp_path: Path, chain: Chain) -> None:
    with pytest.raises(BrokenVersion, match="not a delta to version 1"):
        build(chain, [chain.manifests[1], chain.manifests[3]], chain.path(0), tmp_path / "v")


def test_encoding_is_deterministic_and_the_parent_is_audited(chain: Chain) -> None:
    def run() -> list[bytes]:
        return list(Encoding(Snapshot(chain.path(2)), Snapshot(chain.path(1))).chunks())

    assert run() == run()
    for before, after in itertools.pairwise(chain.manifests):
        assert after.parent == signing.digest(before)
        assert (after.base_version, after.base_hash) == (before.version, before.state_hash)


def test_an_unknown_codec_is_refused_by_name(chain: Chain) -> None:
    with pytest.raises(WeightError, match="d8-zstd, d10-zstd"):
        Encoding(Snapshot(chain.path(1)), None, name="d9")
