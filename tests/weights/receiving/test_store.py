"""The store: its files never change, and files of other runs are linked and not copied."""

from pathlib import Path

import pytest
import torch

from headrace.weights import snapshot, tensor_state
from headrace.weights.receiving.store import SnapshotStore


def put(store: SnapshotStore, version: int) -> str:
    digest = tensor_state.write(store.path(version), {"w": torch.full((4,), float(version))})
    store.put(version, digest)
    return digest


def test_versions_are_found_by_number_and_state_and_pruned_but_for_pins(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "node")
    digests = [put(store, version) for version in range(6)]
    assert store.find(3, digests[3]) == store.path(3)
    assert store.find(3, digests[2]) is None
    assert store.find(7, digests[2]) is None
    assert store.keep(2, pinned=[0, 9]) == [1, 2, 3]
    assert store.versions() == [0, 4, 5]
    assert sorted(path.name for path in store.folder.iterdir()) == [f"{v}.safetensors" for v in (0, 4, 5)]
    assert store.find(1, digests[1]) is None
    assert store.keep(9) == []
    assert store.keep(0, [5]) == [0, 4]


def test_a_start_takes_stock_and_clears_what_is_half(tmp_path: Path) -> None:
    first = SnapshotStore(tmp_path)
    digests = [put(first, version) for version in range(3)]
    (tmp_path / ".7.safetensors.99.0.part").write_bytes(b"half")
    first.path(1).write_bytes(first.path(1).read_bytes()[:-3])
    data = bytearray(first.path(2).read_bytes())
    data[-1] ^= 1
    first.path(2).write_bytes(data)
    (tmp_path / "notes.safetensors").write_bytes(b"someone else's")
    second = SnapshotStore(tmp_path)
    assert set(second.scan()) == {0, 2}
    assert second.find(0, digests[0]) is not None
    assert second.find(2, digests[2]) is None, "its bits are not what they were"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "2.safetensors", "notes.safetensors"]


def test_a_file_is_taken_by_link_and_outlives_its_owner(tmp_path: Path) -> None:
    digest = tensor_state.write(tmp_path / "trainer" / "a", {"w": torch.ones(3)})
    store = SnapshotStore(tmp_path / "node")
    for _ in range(2):
        path = store.take(tmp_path / "trainer" / "a", 4)
        assert path.samefile(tmp_path / "trainer" / "a")
        assert [file.name for file in store.folder.iterdir()] == ["4.safetensors"]
    (tmp_path / "trainer" / "a").unlink()
    assert snapshot.file_hash(path) == digest
    with pytest.raises(FileNotFoundError):
        store.take(tmp_path / "trainer" / "a", 5)
