"""Adapters of a model of transformers: PEFT computes the same from the folder, and so does the merged export."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.policy.adapters import low_rank, shape
from headrace.policy.adapters import peft as peft_folder
from headrace.policy.config import CheckpointError
from headrace.policy.hugging.model import HuggingModel
from headrace.policy.layout import hugging_face, sizes
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.training import checkpoint
from headrace.training.state import TrainerState, freeze
from headrace.training.step import take
from tests.policy.hugging.test_types import written
from tests.support import model_types
from tests.support.model_types import RECIPE, batch, segments

peft = pytest.importorskip("peft")
EXPERTS = ("q_proj", "gate_up_proj", "down_proj")
KINDS = [
    pytest.param("qwen3_5_text", (), id="recurrent"),
    pytest.param("mixtral", EXPERTS, id="experts"),
    *(pytest.param(kind, (), marks=pytest.mark.slow, id=kind) for kind in ("deepseek_v3", "phi3", "lfm2", "llama")),
    *(pytest.param(kind, EXPERTS, marks=pytest.mark.slow, id=kind) for kind in ("gpt_oss", "qwen3_moe", "minimax_m2")),
]


def adapted(folder: Path, targets: tuple[str, ...], seed: int = 3) -> HuggingModel:
    plain = hugging_face.read(folder, "transformers")
    config = msgspec.structs.replace(plain, adapter=shape.resolved(plain, 4, 8.0, targets))
    model = build(config, probe(config, exact=False), seed=seed)
    assert isinstance(model, HuggingModel)
    model.load(folder)
    freeze(model, ())
    return model


@pytest.mark.parametrize("kind, targets", KINDS)
@pytest.mark.filterwarnings("ignore")  # by PEFT
def test_peft_and_the_merged_export_compute_what_the_policy_computes(
    kind: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = model_types.folder(tmp_path / kind, kind)
    model, ids = adapted(folder, targets), torch.arange(3, 43)
    state, parts = TrainerState(model), segments(model.config)
    begun = state.published()
    with torch.no_grad():
        assert torch.equal(model.logits(model(ids, [40])), model_types.plain(folder)(ids[None]).logits[0])
    model.recompute = True
    for _ in range(2):  # A has a gradient as soon as B is not zero
        assert not take(state, batch(parts), RECIPE).failed
    after = state.published()
    moved = {name for name in after if not torch.equal(begun[name], after[name])}
    assert moved == {name for name in after if low_rank.is_published(name)}

    checkpoint.save(tmp_path / "saved.safetensors", state)
    fresh = TrainerState(freeze(build(model.config, model.numerics), ()))
    checkpoint.load(tmp_path / "saved.safetensors", fresh)
    assert take(state, batch(parts), RECIPE).state_hash == take(fresh, batch(parts), RECIPE).state_hash

    counted = sizes.parameters(model.config).total
    assert counted == sum(parameter.numel() for parameter in model.parameters())
    tensors = state.published()
    size = peft_folder.export(model.config, tensors, str(folder), "", tmp_path / "adapter")
    assert size == 4 * shape.parameters(model.config)
    written(model, folder, tmp_path / "merged", tensors)
    theirs: Any = peft.PeftModel.from_pretrained(model_types.plain(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        want = model.logits(model(ids, [40]))
        torch.testing.assert_close(theirs(ids[None]).logits[0], want, rtol=0, atol=1e-5)
        merged = model_types.plain(tmp_path / "merged")(ids[None]).logits[0]
        torch.testing.assert_close(merged, want, rtol=0, atol=1e-5)


def test_a_target_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "mixtral", "mixtral")
    with pytest.raises(CheckpointError, match=r"targets: expected names among q_proj.*gate_up_proj.*got 'kv_b_proj'"):
        adapted(folder, ("kv_b_proj",))
