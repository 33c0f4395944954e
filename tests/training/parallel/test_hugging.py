"""A model of transformers over ranks: version 0 has the hash of one process, a step its gradient, and a checkpoint
goes on with the same bits."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed.tensor import DTensor

from headrace.config import Config, Mesh, Policy
from headrace.config.training import Lora
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.training.gradient import Helpers, accumulate
from headrace.training.parallel import group, opening
from headrace.training.state import TrainerState, freeze
from headrace.training.step import take
from tests.support import model_types
from tests.support.model_types import RECIPE, batch, segments
from tests.support.rank_processes import group_of, joining
from tests.support.world import CONFIG

SMALL = RECIPE._replace(micro_tokens=20)
"""Two micro-batches, whose sequences make unequal numbers of batches of rows."""


def setting(folder: Path, mesh: Mesh, **trainer: Any) -> Config:
    return msgspec.structs.replace(
        CONFIG,
        policy=Policy(checkpoint=str(folder), provider="transformers"),
        trainer=msgspec.structs.replace(CONFIG.trainer, mesh=mesh, **trainer),
        mid_training=msgspec.structs.replace(CONFIG.mid_training, tokens=0),
        engine=msgspec.structs.replace(CONFIG.engine, exact=False),
    )


def rank(arguments: str) -> None:
    number, config, folder, begin, store = joining(arguments)
    trainer = opening.joined(config, folder, number, store, opening.Beginning(begin) if number == 0 else None)
    state, file = trainer.state, folder / "checkpoint.safetensors"
    fixed = [each for each in trainer.sharded.sharded.parameters.values() if each.dim() > 1 and not each.requires_grad]
    assert all(isinstance(each, DTensor) for each in fixed), "every process holds fixed weights whole"
    told: list[str | float] = [state.hash()]
    data, helpers = batch(segments(state.model.config)), Helpers(data_parallel=trainer.world)
    told.append(accumulate(state, data, SMALL, helpers=helpers).loss)
    told.append(state.gradient_norm())
    assert not take(state, data, SMALL, None, helpers).failed
    trainer._save({})  # `save` is for a first process that others obey
    told.append(take(state, data, SMALL, None, helpers).state_hash)
    trainer.load(file)
    told.append(take(trainer.state, data, SMALL, None, helpers).state_hash)
    print(json.dumps(told), flush=True)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(shard=2, replicate=2)], ids=["sharded", "copies"])
@pytest.mark.parametrize("kind", ["gemma3_text", "minimax_m2", "qwen3_5_moe_text"])
def test_ranks_compute_what_one_process_computes(kind: str, mesh: Mesh, tmp_path: Path) -> None:
    compare(setting(model_types.folder(tmp_path / "model", kind), mesh), tmp_path)


@pytest.mark.slow
def test_ranks_train_adapters_of_experts_and_what_is_not_frozen_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = model_types.folder(tmp_path / "mixtral", "mixtral")
    lora = Lora(rank=4, targets=("q_proj", "gate_up_proj", "down_proj"))
    compare(setting(folder, Mesh(shard=2), lora=lora), tmp_path / "adapters")
    folder = model_types.folder(tmp_path / "llama", "llama")
    compare(setting(folder, Mesh(shard=2), frozen=("*.layers.0.*", "*embed*")), tmp_path / "frozen")


def compare(config: Config, tmp_path: Path) -> None:
    """A group of ranks with one process."""
    shape = hugging_face.of_run(config)
    model = build(shape, probe(shape, exact=False), seed=config.run.seed)
    model.load(config.policy.checkpoint)
    state = TrainerState(freeze(model, config.trainer.frozen))
    tmp_path.mkdir(exist_ok=True)
    begun = state.hash()
    loss = accumulate(state, batch(segments(shape)), SMALL).loss
    told = group_of("tests.training.parallel.test_hugging", config, tmp_path / "run", config.policy.checkpoint)
    for version, ranks_loss, norm, second, again in told:
        assert version == begun
        assert math.isclose(ranks_loss, loss, rel_tol=1e-5)
        assert math.isclose(norm, state.gradient_norm(), rel_tol=1e-5)
        assert second == again
