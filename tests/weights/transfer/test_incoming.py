"""A snapshot file from pieces: what is there stays, what is wrong is named, and any mixture of both is completed."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from headrace.messages.weights import WeightManifest
from headrace.weights import shards, snapshot, state, tensor_state
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.receiving.staging import BrokenVersion
from headrace.weights.snapshot import Snapshot
from headrace.weights.transfer.fetching import fetch
from headrace.weights.transfer.incoming import PIECE_BYTES, IncomingFile, pieces
from headrace.weights.transfer.sources import LocalFile
from tests.support.weights import model

pytestmark = pytest.mark.anyio


def published(path: Path, count: int = 1, wide: int = 300) -> WeightManifest:
    """A file, and the manifest of it as a detached full snapshot of `count` shards."""
    tensor_state.write(path, model(wide=wide) | {f"norm.{n}": model(n)["layers.0.up"] for n in range(9)})
    encoding = Encoding(Snapshot(path), None, shards=count, detached=True)
    assert list(encoding.chunks()) == []
    return encoding.manifest("r1", 3, [], base=None, step=3)


async def quiet(text: str) -> None:
    raise AssertionError(text)


async def completed(file: IncomingFile, source: Path) -> None:
    await fetch(file, [LocalFile(source)], quiet)
    assert file.missing == []
    file.commit()


def test_pieces_cover_every_block_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    manifest = published(tmp_path / "a", wide=200_000)
    cut = pieces(manifest.tensors, [True] * len(manifest.tensors))
    blocks = [part.block for piece in cut for part in piece.parts]
    assert sorted(blocks) == list(range(len(manifest.block_hashes) // 16))
    assert max(piece.bytes for piece in cut) <= PIECE_BYTES and len(cut) > 1
    assert sum(piece.bytes for piece in cut) == manifest.raw_bytes


async def test_a_file_that_lacks_any_of_its_blocks_is_completed(tmp_path: Path) -> None:
    manifest = published(tmp_path / "a")
    with IncomingFile(tmp_path / "b", manifest) as file:
        file.open()
        await completed(file, tmp_path / "a")
    whole = (tmp_path / "b").read_bytes()
    assert snapshot.file_hash(tmp_path / "b") == manifest.state_hash
    rng = np.random.default_rng(1)
    names = [info.name for info in manifest.tensors]
    for lacking in range(1, len(names)):
        left = tmp_path / f".{manifest.state_hash}.arriving"
        left.write_bytes(whole)
        damaged = rng.choice(names, lacking, replace=False)
        with snapshot.Rows(left, manifest.tensors, {}) as rows:
            for name in damaged:
                at = names.index(str(name))
                kind = state.unsigned(manifest.tensors[at].dtype)
                rows.write(at, 0, ~Snapshot(tmp_path / "a").array(manifest.tensors[at])[:1].astype(kind))
        with IncomingFile(tmp_path / "c", manifest) as file:
            file.open()
            missing = {manifest.tensors[part.tensor].name for piece in file.missing for part in piece.parts}
            assert missing == set(damaged)
            await completed(file, tmp_path / "a")
        assert snapshot.file_hash(tmp_path / "c") == manifest.state_hash


async def test_a_node_that_wants_some_shards_fetches_their_tensors_alone(tmp_path: Path) -> None:
    manifest = published(tmp_path / "a", count=3)
    wanted = frozenset({1})
    for source in ("a", "part"):  # from a node with everything, then from one with the same shards
        with IncomingFile(tmp_path / "part.new", manifest, wanted) as file:
            file.open()
            assert 0 < sum(piece.bytes for piece in file.missing) < manifest.raw_bytes
            await completed(file, tmp_path / source)
        (tmp_path / "part.new").rename(tmp_path / "part")
        assert snapshot.file_hash(tmp_path / "part") == shards.state_hash(manifest, wanted)


async def test_a_file_of_another_layout_is_refused_and_one_with_other_metadata_is_read(tmp_path: Path) -> None:
    manifest = published(tmp_path / "a")
    tensors = tensor_state.read(tmp_path / "a")
    save_file(dict(tensors), str(tmp_path / "other"), metadata={"format": "pt"})
    with IncomingFile(tmp_path / "b", manifest) as file:
        file.open()
        told: list[str] = []

        async def tell(text: str) -> None:
            told.append(text)

        await fetch(file, [LocalFile(tmp_path / "other")], tell)
        assert told == [f"{tmp_path}/other has the tensors in another order"] and file.missing
        with snapshot.Draft(tmp_path / "noted", manifest.tensors, {"note": "x" * 999}) as noted:
            for index, bits in enumerate(Snapshot(tmp_path / "a").arrays()):
                noted.write(index, 0, bits)
            noted.commit()
        await completed(file, tmp_path / "noted")
    assert snapshot.file_hash(tmp_path / "b") == manifest.state_hash


def test_a_detached_manifest_has_no_chunks_and_no_base(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(published(tmp_path / "a"), base_version=2)
    with pytest.raises(BrokenVersion, match="detached and has chunks or a base"):
        IncomingFile(tmp_path / "b", manifest)
