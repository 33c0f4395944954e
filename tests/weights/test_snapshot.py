"""Snapshot files are plain safetensors, mapped, and appear whole or not at all."""

import os
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from headrace.weights import snapshot, state, tensor_state


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "odd": torch.randint(0, 255, (3,), generator=generator, dtype=torch.uint8),
        "w": torch.randn(5, 9, generator=generator).bfloat16(),
        "m": torch.randn(4, generator=generator),
        "e": torch.zeros(0, 3),
        "s": torch.tensor(2.5, dtype=torch.float64),
        "q": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
    }


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    digest = tensor_state.write(tmp_path / "deep" / "v.safetensors", tensors)
    back = tensor_state.read(tmp_path / "deep" / "v.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in back.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    assert digest == tensor_state.state_hash(back) == tensor_state.state_hash(tensors)
    assert digest == snapshot.file_hash(tmp_path / "deep" / "v.safetensors")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["v.safetensors"]


def test_safetensors_itself_reads_ours_and_we_read_its(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    digest = tensor_state.write(tmp_path / "ours", tensors)
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    assert tensor_state.state_hash(theirs) == digest
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert snapshot.file_hash(tmp_path / "theirs") == digest


def test_the_same_state_is_the_same_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensor_state.write(tmp_path / "a", tensors)
    tensor_state.write(tmp_path / "b", {name: tensors[name] for name in reversed(tensors)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tensors_are_private_and_outlive_the_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "v"
    digest = tensor_state.write(path, tensors)
    back = tensor_state.read(path)
    back["w"].zero_()
    assert snapshot.file_hash(path) == digest
    again = tensor_state.read(path)
    path.unlink()
    assert tensor_state.state_hash(again) == digest


def test_a_draft_that_is_not_committed_leaves_nothing(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    described = tensor_state.infos(tensors)
    with pytest.raises(RuntimeError, match="half"), snapshot.Draft(tmp_path / "v", described) as draft:
        draft.write(0, 0, tensor_state.state_bits(tensors)[0])
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_the_old_file_keeps_it_when_a_new_one_takes_the_name(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    old = tensor_state.write(tmp_path / "v", tensors)
    held = tensor_state.read(tmp_path / "v")
    new = tensor_state.write(tmp_path / "v", {"w": torch.ones(3)})
    assert (tensor_state.state_hash(held), snapshot.file_hash(tmp_path / "v")) == (old, new)


@pytest.mark.parametrize("damage", ["empty", "short", "length", "json", "cut", "dtype"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, tensors: dict[str, Tensor], damage: str) -> None:
    path = tmp_path / "v.safetensors"
    tensor_state.write(path, tensors)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": data[:5],
            "length": b"\xff" * 8 + data[8:],
            "json": data[:8] + b"!" + data[9:],
            "cut": data[:-1],
            "dtype": data.replace(b'"F32"', b'"Q32"'),
        }[damage]
    )
    with pytest.raises(state.WeightError, match=r"v\.safetensors|Q32"):
        snapshot.file_hash(path)


def test_drafts_of_processes_that_have_ended_are_deleted(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    dead = tmp_path / f".v1.safetensors.{ended.pid}.0.part"
    alive = tmp_path / f".v1.safetensors.{os.getpid()}.0.part"
    for file in (dead, alive, tmp_path / "v1.safetensors"):
        file.touch()
    snapshot.discard_abandoned(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([alive.name, "v1.safetensors"])


def test_metadata_of_another_length_cannot_replace_a_drafts(tmp_path: Path) -> None:
    described = tensor_state.infos({"a": torch.zeros(3)})
    with snapshot.Draft(tmp_path / "x", described, {"state_hash": "00"}) as draft:
        draft.describe({"state_hash": "ab"})
        with pytest.raises(ValueError, match="expected metadata of as many bytes as before"):
            draft.describe({"state_hash": "a much longer text"})
        draft.commit(tmp_path / "y")
    assert snapshot.Snapshot(tmp_path / "y").metadata == {"state_hash": "ab"}
