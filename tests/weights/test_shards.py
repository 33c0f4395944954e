"""Shards: the bytes of a version do not depend on who encodes it, and a rank builds its own part alone."""

from pathlib import Path

import pytest

from headrace.messages.weights import ChunkInfo, TensorInfo
from headrace.weights import shards, snapshot, state, tensor_state
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.receiving.staging import BrokenVersion, StagedFile
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from tests.support.weights import model, step


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    tensors = model(wide=4000)
    tensor_state.write(tmp_path / "base", tensors)
    tensor_state.write(tmp_path / "target", step(tensors, 1, 0.05))
    return tmp_path / "base", tmp_path / "target"


def test_tensors_are_cut_where_the_bytes_are_even_and_stay_in_order() -> None:
    tensors = [TensorInfo(f"layer.{n:02}", "BF16", (100, 10 + n % 3)) for n in range(30)]
    for count in (1, 2, 4, 7):
        shard_ids = [info.shard for info in shards.assign(tensors, count)]
        assert shard_ids == sorted(shard_ids) and set(shard_ids) == set(range(count))
        sizes = [
            sum(state.nbytes(info) for info, at in zip(tensors, shard_ids, strict=True) if at == n)
            for n in range(count)
        ]
        assert max(sizes) - min(sizes) <= 2 * 2400
    assert {info.shard for info in shards.assign(tensors[:1], 5)} <= set(range(5))
    with pytest.raises(WeightError, match="at least one shard"):
        shards.assign(tensors, 0)


@pytest.mark.parametrize("name", ["d8-zstd", "d10-zstd"])
def test_the_bytes_do_not_depend_on_the_number_of_encoders(files: tuple[Path, Path], name: str) -> None:
    base, target = map(Snapshot, files)
    results = []
    for workers in (1, 2, 4):
        encoding = Encoding(target, base, name=name, shards=4, workers=workers)
        pieces = sorted(encoding.pieces(), key=lambda piece: piece[0])
        results.append((pieces, encoding.block_hashes, encoding.changed, encoding.wire_bytes))
    assert results[0] == results[1] == results[2]
    encoding = Encoding(target, base, name=name, shards=4)
    assert list(encoding.pieces()) == results[0][0] and encoding.state_hash == snapshot.file_hash(files[1])


def test_closing_the_pieces_ends_the_encoders(files: tuple[Path, Path]) -> None:
    base, target = map(Snapshot, files)
    pieces = Encoding(target, None, shards=4, workers=4).pieces()
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    broken = Encoding(target, base, shards=4, workers=2)
    del broken.parts[1]._sparse
    with pytest.raises(AttributeError, match="_sparse"):
        list(broken.pieces())


def test_a_rank_builds_its_own_tensors_from_its_own_chunks(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, target = map(Snapshot, files)
    for source in (None, base):
        encoding = Encoding(target, source, shards=3)
        infos: list[ChunkInfo] = []
        data: dict[tuple[int, int], bytes] = {}
        for shard, chunk in encoding.pieces():
            seq = sum(info.shard == shard for info in infos)
            infos.append(describe(chunk, shard, seq, 0))
            data[shard, seq] = chunk
        first = None
        if source is not None:
            empty = Encoding(base, None, shards=3)
            list(empty.pieces())
            first = empty.manifest("r", 0, [], base=None)
        manifest = encoding.manifest("r", 1, infos, base=first)
        wanted = shards.holding(manifest.tensors, ["layers.0.[ns]*"])
        assert wanted is not None and len(wanted) < 3
        path = tmp_path / "part"
        with StagedFile(path, manifest, source, wanted) as staged:
            for info in filter(staged.wants, manifest.chunks):
                staged.add(info, data[info.shard, info.seq])
            state_hash = staged.finish()
        assert state_hash == snapshot.file_hash(path) == shards.state_hash(manifest, wanted) != manifest.state_hash
        part, whole = tensor_state.read(path), tensor_state.read(files[1])
        assert set(part) == {info.name for info in manifest.tensors if info.shard in wanted}
        assert {"layers.0.norm", "layers.0.scale"} <= set(part) and len(part) < len(whole)
        assert tensor_state.state_hash(part) == tensor_state.state_hash({name: whole[name] for name in part})
        other = next(info for info in manifest.chunks if info.shard not in wanted)
        with (
            StagedFile(path, manifest, source, wanted) as staged,
            pytest.raises(BrokenVersion, match="does not belong to shard"),
        ):
            staged.add(other, data[other.shard, other.seq])
    with pytest.raises(WeightError, match="no published tensor matches"):
        shards.holding(manifest.tensors, ["nothing.*"])
    with pytest.raises(BrokenVersion, match="has no shards"):
        StagedFile(tmp_path / "none", manifest, None if source is None else base, frozenset({9}))
