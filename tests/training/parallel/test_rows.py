"""A checkpoint that several processes write, when one of them dies."""

from pathlib import Path
from typing import Any, cast

import pytest

from headrace.messages.weights import TensorInfo
from headrace.training.parallel import rows
from headrace.training.parallel.group import PeerGroup
from headrace.training.parallel.interface import GroupError


class Ending:
    """The first process of a group whose other process dies after `calls` exchanges."""

    rank = 0

    def __init__(self, calls: int) -> None:
        self._left = calls

    def gathered(self, value: Any) -> list[Any]:
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
