"""The shape of a policy of transformers, and what a run refuses of it by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import Config, Mesh, Policy
from headrace.policy.config import CheckpointError
from headrace.policy.layout import hugging_face, refusing
from headrace.policy.layout.sizes import parameters
from headrace.training import memory_plan
from headrace.training.figures.layout import layout_of
from tests.support import model_types


def run(folder: Path, provider: str, *, exact: bool, **trainer: Any) -> Config:
    config = Config()
    return msgspec.structs.replace(
        config,
        policy=Policy(checkpoint=str(folder), provider=provider),  # type: ignore[arg-type]
        engine=msgspec.structs.replace(config.engine, exact=exact),
        trainer=msgspec.structs.replace(config.trainer, **trainer),
    )


def test_a_run_keeps_the_shape_of_its_policy(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "model", "mixtral")
    shape = hugging_face.read(folder)
    assert (shape.experts, shape.top_k, shape.sparse_layers, shape.live_routers) == (4, 2, 2, 0)
    model = model_types.plain(folder)
    assert parameters(shape).total == sum(parameter.numel() for parameter in model.parameters())
    assert parameters(shape).experts == 2 * 4 * 3 * 32 * 48
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "config.json").write_text(json.dumps(hugging_face.as_json(shape)))
    assert hugging_face.read(tmp_path / "kept") == shape
    plan = memory_plan.plan(shape, layout_of(run(folder, "transformers", exact=False)))
    assert plan.weights == 4 * parameters(shape).total < plan.total
    scored = layout_of(run(folder, "transformers", exact=False))._replace(rescore=True, versions=2)
    both = [memory_plan.plan(shape, layout) for layout in (scored, scored._replace(rescore=False))]
    assert both[0].undo > 0 < both[0].scoring and (both[1].undo, both[1].scoring) == (0, 0)
    refusing.refuse(shape, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        refusing.refuse(shape, folder)


def test_auto_is_native_where_exact_mode_is_asked_of_a_known_type(tmp_path: Path) -> None:
    llama = model_types.folder(tmp_path / "llama", "qwen2")
    gemma = model_types.folder(tmp_path / "gemma", "gemma3_text")
    assert not hugging_face.of_run(run(llama, "auto", exact=True)).source
    assert hugging_face.of_run(run(llama, "auto", exact=False)).source
    with pytest.raises(CheckpointError, match=r"\[engine\] exact"):
        hugging_face.of_run(run(gemma, "auto", exact=True))
    with pytest.raises(CheckpointError, match="provider"):
        hugging_face.of_run(run(gemma, "native", exact=False))


def test_a_router_that_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    shape = hugging_face.read(model_types.folder(tmp_path / "model", "phimoe"))
    assert (shape.experts, shape.live_routers) == (0, 2)


@pytest.mark.parametrize(
    ("key", "trainer"),
    [("mesh.context", {"mesh": Mesh(shard=2, context=2)}), ("mesh.expert", {"mesh": Mesh(shard=2, expert=2)})],
)
def test_what_the_provider_lacks_is_refused_by_name(key: str, trainer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        hugging_face.of_run(run(tmp_path, "transformers", exact=False, **trainer))


def test_quantised_and_foreign_code_are_refused(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "model", "qwen2")
    raw = json.loads((folder / "config.json").read_text())
    for changed, said in (
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"model_type": "of_a_folder", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map"),
    ):
        (folder / "config.json").write_text(json.dumps(raw | changed))
        with pytest.raises(CheckpointError, match=said):
            hugging_face.read(folder, "transformers")
