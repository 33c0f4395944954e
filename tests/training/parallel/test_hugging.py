"""A model of transformers over ranks: version 0 has the hash of one process, a step its gradient, and a checkpoint
goes on with the same bits."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from headrace.config import Config, Mesh, Policy
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.training.gradient import Helpers, accumulate
from headrace.training.parallel import group, opening
from headrace.training.state import TrainerState
from headrace.training.step import take
from tests.support import model_types
from tests.support.model_types import RECIPE, batch, segments
from tests.support.rank_processes import group_of, joining
from tests.support.world import CONFIG

SMALL = RECIPE._replace(micro_tokens=20)
"""Two micro-batches, whose sequences make unequal numbers of batches of rows."""


def setting(folder: Path, mesh: Mesh) -> Config:
    return msgspec.structs.replace(
        CONFIG,
        policy=Policy(checkpoint=str(folder), provider="transformers"),
        trainer=msgspec.structs.replace(CONFIG.trainer, mesh=mesh),
        mid_training=msgspec.structs.replace(CONFIG.mid_training, tokens=0),
        engine=msgspec.structs.replace(CONFIG.engine, exact=False),
    )


def rank(arguments: str) -> None:
    number, config, folder, begin, store = joining(arguments)
    trainer = opening.joined(config, folder, number, store, opening.Beginning(begin) if number == 0 else None)
    state, file = trainer.state, folder / "checkpoint.safetensors"
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
    folder = model_types.folder(tmp_path / "model", kind)
    config = setting(folder, mesh)
    shape = hugging_face.of_run(config)
    model = build(shape, probe(shape, exact=False))
    model.load(folder)
    state = TrainerState(model)
    begun = state.hash()
    loss = accumulate(state, batch(segments(shape)), SMALL).loss
    told = group_of("tests.training.parallel.test_hugging", config, tmp_path / "run", str(folder))
    for version, ranks_loss, norm, second, again in told:
        assert version == begun
        assert math.isclose(ranks_loss, loss, rel_tol=1e-5)
        assert math.isclose(norm, state.gradient_norm(), rel_tol=1e-5)
        assert second == again
