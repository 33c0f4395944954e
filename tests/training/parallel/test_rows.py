"""A checkpoint that several processes write: its hash, and one of them dies."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headrace.messages.weights import TensorInfo
from headrace.training.parallel import rows
from headrace.training.parallel.group import PeerGroup
from headrace.training.parallel.interface import GroupError
from headrace.training.served.runs import ServedRun
from headrace.weights import snapshot, tensor_state
from headrace.weights.state import block_hash
from tests.support.expert_owners import connected


class Ending:
    """The first process of a group whose other process dies after `calls` exchanges."""

    rank, near = 0, 1

    def __init__(self, calls: int) -> None:
        self._left = calls

    def writing(self, path: Path, described: Sequence[TensorInfo], about: Mapping[str, str]) -> snapshot.Rows:
        return snapshot.Rows(path, described, about)

    def gathered(self, value: Any, kind: Any) -> list[Any]:
        if not self._left:
            raise GroupError("rank 1 was killed")
        self._left -= 1
        return [value]


@pytest.mark.parametrize("calls", [0, 1])
def test_a_group_that_ends_leaves_no_part_of_a_checkpoint(tmp_path: Path, calls: int) -> None:
    """An unclosed file would be a ResourceWarning, which fails the test."""
    tensors = [TensorInfo("weight", "F32", (2, 4))]
    with pytest.raises(GroupError):
        rows.write(tmp_path / "checkpoint.safetensors", tensors, {}, [], cast(PeerGroup, Ending(calls)))
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_lives_writes_it(tmp_path: Path) -> None:
    tensors = [TensorInfo("weight", "F32", (2, 4))]
    rows.write(tmp_path / "checkpoint.safetensors", tensors, {}, [], cast(PeerGroup, Ending(3)))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_rows_that_are_not_in_the_order_of_ranks_give_the_hash_of_the_whole_tensor() -> None:
    """Four processes in two expert groups: rank 1 holds the third quarter of the experts and rank 2 the second."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    described = [TensorInfo("weight", "F32", (4, 6))]
    store = HashStore()

    def process(rank: int) -> bytes:
        peers = object.__new__(PeerGroup)  # its constructor needs the interpreter's only group
        peers.rank, peers.size, peers.group = rank, 4, connected(store, "rows", rank, 4)
        row = (0, 2, 1, 3)[rank]
        run = ServedRun("weight", row * 6, 6, lambda start, count: tensor_state.bits(whole[row, start : start + count]))
        return rows.hashes(described, [run], peers)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(process, range(4))) == {block_hash(tensor_state.bits(whole))}
