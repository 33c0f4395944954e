"""Hugging Face checkpoints in and out, against transformers itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.config import Policy
from headrace.policy.config import CheckpointError
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.rope import RopeScaling
from tests.support import tiny


def theirs(folder: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.Qwen3MoeForCausalLM if config.model_type == "qwen3_moe" else transformers.Qwen3ForCausalLM
    loaded: torch.nn.Module = kind.from_pretrained(folder, dtype="auto")
    return loaded.eval()


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(ids[None]).logits[0]
    return out


def ours(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    config, tensors = checkpoint.load(folder)
    model = Model(config, tiny.numerics(config), seed=None)
    model.load_state(tensors)
    with torch.no_grad():
        return model.logits(model(ids, [len(ids)]))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_checkpoint_gives_its_logits(tmp_path: Path, normalise: bool, tied: bool) -> None:
    torch.manual_seed(3)
    fields: dict[str, Any] = dict(
        vocab_size=200, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, intermediate_size=64, rope_theta=50_000.0,
        norm_topk_prob=normalise, tie_word_embeddings=tied, initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 200, (150,))
    want = logits_of(model, ids)
    assert float(want.std()) > 0.3
    torch.testing.assert_close(ours(tmp_path, ids), want, rtol=0, atol=1e-4)
    assert hugging_face.read(tmp_path).rope_theta == 50_000.0


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"experts": 0, "top_k": 0}])
def test_our_checkpoint_loads_in_transformers(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    config = tiny.config(**changes)
    model = tiny.model(config)
    checkpoint.save(tmp_path, model, config)
    ids = tiny.tokens(config, 150)
    mine = ours(tmp_path, ids)
    torch.testing.assert_close(mine, logits_of(theirs(tmp_path), ids), rtol=0, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(mine, model.logits(model(ids, [150])))
    assert hugging_face.read(tmp_path) == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_transformers_4_reads_a_scaling_of_positions_under_its_own_name() -> None:
    """It ignores `rope_parameters`, and logits were off by 6 to 7."""
    scaling = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
    raw = hugging_face.as_json(msgspec.structs.replace(tiny.config(experts=0, top_k=0), rope=scaling))
    spelled = dict(raw["rope_parameters"])
    assert (raw["rope_theta"], raw["rope_scaling"]) == (spelled.pop("rope_theta"), spelled)
    assert hugging_face.as_json(tiny.config())["rope_scaling"] is None


def test_bfloat16_bits_survive(tmp_path: Path) -> None:
    config = tiny.config("bfloat16")
    state = tiny.model(config).state()
    checkpoint.save(tmp_path, state, config)
    read, tensors = checkpoint.load(tmp_path)
    assert read == config and all(torch.equal(state[name], tensors[name]) for name in state)


def test_sharded_files_are_read(tmp_path: Path) -> None:
    config = tiny.config()
    state = tiny.model(config).state()
    checkpoint.save(tmp_path, state, config)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.load(tmp_path)[1].keys() == state.keys()
    for file in ("../model-1.safetensors", str(tmp_path / "model-1.safetensors"), "", "a\0"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: file}}))
        with pytest.raises(CheckpointError, match="no file of the folder"):
            checkpoint.load(tmp_path)


def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny.config()
    checkpoint.save(tmp_path, tiny.model(config), config)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("attention_bias", True), ("mlp_only_layers", [0]), ("use_sliding_window", True)):
        with pytest.raises(CheckpointError, match=key):
            hugging_face.parse(raw | {key: value})
    with pytest.raises(CheckpointError, match="dynamic"):
        hugging_face.parse(raw | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    with pytest.raises(CheckpointError, match="model_type 'bert' is not supported by the provider native, only qwen3"):
        hugging_face.parse(raw | {"model_type": "bert"})
    raw.pop("hidden_size")
    with pytest.raises(CheckpointError, match="no 'hidden_size'"):
        hugging_face.parse(raw)


def test_a_broken_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.load(tmp_path)
    config = tiny.config()
    checkpoint.save(tmp_path, tiny.model(config), config)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        checkpoint.load(tmp_path)


def test_the_policy_section_makes_the_tiny_default(tmp_path: Path) -> None:
    config = hugging_face.from_section(Policy())
    assert (config.dim, config.layers, config.experts, config.vocab, config.dtype) == (96, 2, 8, 640, "float32")
    other = tiny.odd()
    checkpoint.save(tmp_path, tiny.model(other), other)
    assert hugging_face.from_section(Policy(checkpoint=str(tmp_path))) == other


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 3, "kv_heads": 2}, "a multiple of 2 key-value heads, got 3"),
        ({"top_k": 9}, "8, got 9"),
        ({"head_dim": 31}, "even head_dim.*got 31"),
    ],
)
def test_impossible_shapes_are_refused(changes: Mapping[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        tiny.config(**changes)


OPTIONAL = (
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "head_dim"),
    *("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "n_shared_experts"),
    *("rope_interleave", "attention_bias", "use_qk_norm", "rope_parameters", "q_lora_rank", "mlp_bias"),
)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "glm4_moe", "deepseek_v3"])
def test_a_field_that_config_json_leaves_out_has_the_types_own_value(kind: str) -> None:
    def whole(**fields: Any) -> dict[str, Any]:
        made: dict[str, Any] = transformers.AutoConfig.for_model(kind, **fields).to_dict()
        own = {"dtype": "float32", "num_experts": made.get("num_local_experts")}
        return made | own | ({"sliding_window": None} if "sliding_window" in made else {})

    every = whole()
    for name in set(OPTIONAL) & set(every):
        trimmed = {key: value for key, value in every.items() if key != name}
        fields = {key: value for key, value in trimmed.items() if key != "model_type"}
        assert hugging_face.parse(trimmed) == hugging_face.parse(whole(**fields)), name
