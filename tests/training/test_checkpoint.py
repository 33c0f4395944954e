from pathlib import Path

import msgspec
import pytest
import torch

from headrace.algorithms.adamw import OptimizerSettings
from headrace.policy.model import Model
from headrace.training import checkpoint
from headrace.training.checkpoint import Damaged, UnusableCheckpoint
from headrace.training.state import TrainerState
from tests.support.world import NUMERICS, POLICY, model
from tests.training.test_state import IDS, backward

NARROW = OptimizerSettings(moments=torch.uint8)


def moved(steps: int = 2, settings: OptimizerSettings | None = None) -> TrainerState:
    state = TrainerState(model(), settings=settings)
    for _ in range(steps):
        backward(state.model)
        state.apply(1e-2)
        state.version += 1
    return state


def blank(settings: OptimizerSettings | None = None) -> TrainerState:
    return TrainerState(Model(POLICY, NUMERICS, seed=None), settings=settings)


@pytest.mark.parametrize("settings", [None, NARROW], ids=["float32", "eight_bit"])
def test_goes_on_bit_equal(tmp_path: Path, settings: OptimizerSettings | None) -> None:
    state, other = moved(settings=settings), blank(settings)
    checkpoint.save(tmp_path / "c", state, position={"close_seq": 17, "fence": "x"})
    loaded = checkpoint.load(tmp_path / "c", other)
    assert loaded.position == {"close_seq": 17, "fence": "x"}
    assert (other.version, other.step) == (2, 2)
    for each in (state, other):
        for _ in range(3):
            backward(each.model)
            each.apply(1e-2)
    assert state.hash() == other.hash()
    tensors = other.tensors()
    assert all(torch.equal(value, tensors[name]) for name, value in state.tensors().items())


def test_scales_of_moments_are_saved_and_needed(tmp_path: Path) -> None:
    state = moved(settings=NARROW)
    tensors = state.tensors()
    assert tensors["exp_avg.layers.0.qkv"].dtype == torch.uint8
    assert tensors["exp_avg_sq_scale.layers.0.qkv"].dtype == torch.float32
    checkpoint.save(tmp_path / "c", state)
    del tensors["exp_avg_sq_scale.layers.0.qkv"]
    with pytest.raises(KeyError, match=r"exp_avg_sq_scale.layers.0.qkv"):
        blank(NARROW).restore(tensors, version=2, step=2)


def test_without_the_moments_it_would_not(tmp_path: Path) -> None:
    state, other = moved(), blank()
    other.restore(state.tensors(), version=2, step=0)
    for each in (state, other):
        backward(each.model)
        each.apply(1e-2)
    assert state.hash() != other.hash()


def test_a_fresh_state_has_no_moments_yet(tmp_path: Path) -> None:
    state, other = moved(0), blank()
    checkpoint.save(tmp_path / "c", state)
    assert checkpoint.load(tmp_path / "c", other).kept == {}
    assert state.hash() == other.hash()


def test_keeps_versions(tmp_path: Path) -> None:
    state = moved()
    weights = {3: model(3).state(), 4: model(4).state()}
    checkpoint.save(tmp_path / "c", state, kept=weights)
    loaded = checkpoint.load(tmp_path / "c", blank())
    assert loaded.kept.keys() == {3, 4}
    again = Model(POLICY, NUMERICS, seed=None)
    again.load_state(loaded.kept[4])
    with torch.no_grad():
        assert torch.equal(again(IDS, [20]), model(4)(IDS, [20]))


def test_replaces_the_old_one_whole(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", moved(1))
    checkpoint.save(tmp_path / "c", moved(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    other = blank()
    checkpoint.load(tmp_path / "c", other)
    assert other.version == 2


@pytest.mark.parametrize("damage", ["bits", "step", "position", "length", "empty"])
def test_a_file_that_is_not_what_was_written_is_damaged(tmp_path: Path, damage: str) -> None:
    file, state = tmp_path / "c", moved()
    checkpoint.save(file, state, position={"close_seq": 3})
    data = file.read_bytes()
    changed = {
        "bits": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "step": data.replace(f'"step":"{state.step}"'.encode(), f'"step":"{state.step + 1}"'.encode(), 1),
        "position": data.replace(b'close_seq\\": 3', b'close_seq\\": 4', 1),
        "length": data[:-100],
        "empty": b"",
    }[damage]
    assert changed != data
    file.write_bytes(changed)
    with pytest.raises(Damaged):
        checkpoint.load(file, blank())


def test_refuses_what_is_broken_or_foreign(tmp_path: Path) -> None:
    file = tmp_path / "c"
    with pytest.raises(FileNotFoundError):
        checkpoint.load(file, blank())
    checkpoint.save(file, moved())
    small = msgspec.structs.replace(POLICY, layers=1, vocab=300)
    with pytest.raises(UnusableCheckpoint, match="another model"):
        checkpoint.load(file, TrainerState(Model(small, NUMERICS, seed=0)))
    from headrace.weights import tensor_state

    tensor_state.write(file, model().state())
    with pytest.raises(UnusableCheckpoint, match="not a trainer checkpoint"):
        checkpoint.load(file, blank())
