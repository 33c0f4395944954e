"""Experts in eight or four bits: masters stay float32, the same bytes are trained on, published and sampled from."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.config import Mesh, Policy
from headrace.policy.config import CheckpointError, Dtype, PolicyConfig
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.training.state import TrainerState
from headrace.weights import tensor_state
from headrace.weights.tensor_state import state_hash
from tests.policy.test_families import latent
from tests.support import tiny
from tests.support.engines import Versions, prompts, session
from tests.support.world import CONFIG

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ELEMENTS = {"mxfp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
GRIDS = pytest.mark.parametrize("grid", ELEMENTS)


def config(grid: str, dtype: Dtype = "float32") -> PolicyConfig:
    return tiny.config(dtype, expert_format=grid)


def learnt(model: Model, steps: int = 2) -> TrainerState:
    state = TrainerState(model)
    ids = tiny.tokens(model.config, 90)
    for _ in range(steps):
        torch.autograd.backward(model.selected_logprobs(model(ids, [50, 40]), ids.flip(0))[0].sum().neg())
        state.apply(1e-3)
    return state


@GRIDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_bytes_are_the_ones_computed_on(tmp_path: Path, grid: str, dtype: Dtype) -> None:
    model = tiny.model(config(grid, dtype))
    state = learnt(model)
    published = state.published()
    assert published[EXPERT].dtype == ELEMENTS[grid] and published[EXPERT + "_scale"].itemsize == 1
    assert (EXPERT + "_scale_2" in published) == (grid == "nvfp4")
    assert published["model.layers.1.mlp.gate.weight"].dtype == config(grid, dtype).torch_dtype
    assert tensor_state.write(tmp_path / "v1", published) == state.hash()
    sampler = Model(config(grid, dtype), model.numerics, seed=None)
    sampler.load_state(tensor_state.read(tmp_path / "v1"))
    assert all(torch.equal(a, b) for a, b in zip(sampler.parameters(), model.parameters(), strict=True))
    assert state_hash(sampler.state()) == state.hash()


@GRIDS
def test_masters_keep_what_the_grid_drops(grid: str) -> None:
    model = tiny.model(config(grid))
    before = model.get_parameter("layers.0.down").detach().clone()
    state = TrainerState(model)
    master = state.master["layers.0.down"]
    assert master is not model.get_parameter("layers.0.down") and master.dtype == torch.float32
    ids = tiny.tokens(model.config, 90)
    for _ in range(3):
        torch.autograd.backward(model.selected_logprobs(model(ids, [90]), ids.flip(0))[0].sum().neg())
        state.apply(1e-6)
    assert not torch.equal(master, before), "steps smaller than the grid add up"
    moved = (model.get_parameter("layers.0.down") != before).float().mean()
    assert float(moved) < 0.05
    other = TrainerState(Model(config(grid), model.numerics, seed=4))
    other.restore(state.tensors(), version=3, step=3)
    assert other.hash() == state.hash() and torch.equal(other.master["layers.0.down"], master)


@GRIDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.anyio
async def test_sampler_and_trainer_agree_bit_for_bit(tmp_path: Path, grid: str, dtype: Dtype) -> None:
    versions = Versions(config(grid, dtype), tmp_path)
    engine = versions.engine()
    await versions.load(engine, 0)
    records = [
        await session(engine, config(grid, dtype), f"s{i}", prompt, i, turns=2)
        for i, prompt in enumerate(prompts(config(grid, dtype), 3))
    ]
    await engine.stop()
    for record in records:
        assert torch.equal(record.score(versions), torch.tensor(record.logprobs))


@GRIDS
def test_a_coarse_grid_changes_the_numbers_and_the_fingerprint(grid: str) -> None:
    plain, rough = tiny.model(tiny.config()), tiny.model(config(grid))
    ids = tiny.tokens(plain.config, 60)
    gap = (plain(ids, [60]) - rough(ids, [60])).detach().abs().mean()
    assert 1e-3 < float(gap) < 0.2
    assert plain.numerics.fingerprint != rough.numerics.fingerprint


@GRIDS
def test_checkpoints_in_both_precisions(tmp_path: Path, grid: str) -> None:
    rough = tiny.model(config(grid))
    checkpoint.save(tmp_path / "eight", rough, config(grid))
    read, tensors = checkpoint.load(tmp_path / "eight")
    assert read == config(grid) and tensors[EXPERT].dtype == ELEMENTS[grid]
    back = Model(read, rough.numerics, seed=None)
    back.load_state(tensors)
    assert state_hash(back.state()) == state_hash(rough.state())
    checkpoint.save(tmp_path / "plain", tiny.model(tiny.config()), tiny.config())
    asked = hugging_face.from_section(Policy(checkpoint=str(tmp_path / "plain"), expert_format=grid))  # type: ignore[arg-type]
    assert asked == config(grid)
    cast = Model(asked, rough.numerics, seed=None)
    cast.load_state(checkpoint.load(tmp_path / "plain")[1])
    assert state_hash(cast.state()) == state_hash(rough.state()), "the same weights, rounded on the way in"
    del tensors[EXPERT + "_scale"]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is in (eight|four) bits and has no"):
        back.load_state(tensors)


def test_deepseeks_experts_too_and_widths_that_do_not_fit_are_refused() -> None:
    model = tiny.model(latent(expert_format="mxfp8"))
    assert learnt(model, 1).published()["model.layers.2.mlp.experts.0.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert model.state()["model.layers.2.mlp.shared_experts.down_proj.weight"].dtype == torch.float32
    with pytest.raises(CheckpointError, match="multiples of 32"):
        msgspec.structs.replace(tiny.odd(), expert_format="mxfp8").__post_init__()


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        ("engine", {"kind": "sglang"}, "kind = 'sglang'"),
        ("trainer", {"mesh": Mesh(shard=2)}, "processes = 2"),
        ("weights", {"precision": "bf16"}, "precision = 'bf16'"),
    ],
)
def test_parts_that_do_not_compute_four_bits_are_refused(section: str, changes: dict[str, Any], text: str) -> None:
    policy = Policy(dim=64, head_dim=32, expert_dim=48, expert_format="nvfp4")
    settings = msgspec.structs.replace(CONFIG, policy=policy)
    assert hugging_face.of_run(settings).expert_format == "nvfp4"
    changed = msgspec.structs.replace(getattr(settings, section), **changes)
    with pytest.raises(CheckpointError, match=f"{text} is not supported for nvfp4 experts"):
        hugging_face.of_run(msgspec.structs.replace(settings, **{section: changed}))
