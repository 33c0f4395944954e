"""Models people have, against transformers: dense and sparse Qwen3 and DeepSeek-V3, with every rope scaling."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor

from headrace.messages.base import Array
from headrace.policy import checkpoint, moe
from headrace.policy.config import CheckpointError, Latent, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.rope import RopeScaling
from headrace.training.state import TrainerState
from tests.policy import tiny
from tests.policy.test_model import decoded

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10_000.0,
    },
}  # fmt: skip
QWEN: dict[str, Any] = dict(
    vocab_size=200, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
    intermediate_size=64, initializer_range=0.2, max_position_embeddings=512,
)  # fmt: skip
DEEPSEEK: dict[str, Any] = dict(
    vocab_size=200, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=80, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
    n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5, q_lora_rank=20, kv_lora_rank=16,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, initializer_range=0.2, max_position_embeddings=512,
)  # fmt: skip


def latent(dtype: str = "float32", **changes: Any) -> PolicyConfig:
    low = Latent(q_rank=20, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=16)
    fields: dict[str, Any] = dict(
        dim=64, layers=3, heads=4, kv_heads=4, head_dim=20, experts=8, top_k=2, expert_dim=32, vocab=320, dtype=dtype,
        latent=low, scores="sigmoid", expert_groups=4, kept_groups=2, gate_scale=2.5, shared_experts=1, dense_layers=1,
        dense_dim=80,
    )  # fmt: skip
    return PolicyConfig(**(fields | changes))


def made(config: PolicyConfig) -> Model:
    model = tiny.model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("correction"):
                parameter.copy_(torch.linspace(-0.2, 0.3, config.experts).roll(3))
    return model


def theirs(kind: str, fields: Mapping[str, Any]) -> Any:
    """A random model of theirs whose norms and corrections matter."""
    torch.manual_seed(3)
    kinds: dict[str, Any] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    }
    config, model = kinds[kind]
    out = model(config(**fields)).eval()
    with torch.no_grad():
        named: dict[str, Tensor] = out.state_dict()
        for name, value in named.items():
            if "norm" in name or name.endswith("e_score_correction_bias"):
                value.add_(torch.randn_like(value) * 0.2)
    return out


def compared(folder: Path, model: Any, ids: Tensor) -> None:
    """Logits within 1e-4 and the same experts for every token."""
    routes: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, out: routes.append(out[2].sort(-1).values))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    assert float(want.std()) > 0.3
    config, tensors = checkpoint.load(folder)
    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(tensors)
    recorder: list[Tensor] = []
    with torch.no_grad():
        got = mine.logits(mine(ids, [len(ids)], recorder=recorder))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert len(recorder) == len(routes) == config.sparse_layers
    for own, other in zip(recorder, routes, strict=True):
        assert torch.equal(own.sort(-1).values, other)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_qwen3_is_the_degenerate_case(tmp_path: Path, rope: str, tied: bool) -> None:
    model = theirs("qwen3", QWEN | {"rope_parameters": ROPES[rope], "tie_word_embeddings": tied})
    model.save_pretrained(tmp_path)
    compared(tmp_path, model, tiny.tokens(PolicyConfig.read(tmp_path), 150))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
        {"rope_parameters": ROPES["yarn_mscale"], "tie_word_embeddings": True},
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ],
    ids=["groups", "full_q", "yarn_tied", "kimi"],
)
def test_a_deepseek_v3_gives_its_logits_and_its_experts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = theirs("deepseek_v3", DEEPSEEK | changes)
    model.save_pretrained(tmp_path)
    compared(tmp_path, model, tiny.tokens(PolicyConfig.read(tmp_path), 150))


@pytest.mark.parametrize("kind", ["latent", "yarn"])
def test_our_checkpoint_loads_in_transformers(tmp_path: Path, kind: str) -> None:
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0)
    config = latent() if kind == "latent" else msgspec.structs.replace(tiny.config(), rope=scaling)
    model = made(config)
    checkpoint.save(tmp_path, model, config)
    assert PolicyConfig.read(tmp_path) == config
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    compared(tmp_path, loaded.eval(), tiny.tokens(config, 150))


def test_shards_go_out_and_come_back(tmp_path: Path) -> None:
    config = latent()
    model = made(config)
    checkpoint.save(tmp_path, model, config, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    state = model.state()
    assert len(files) > 2 and index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert all((tmp_path / file).stat().st_size < 120_000 for file in files)
    read, tensors = checkpoint.load(tmp_path)
    assert read == config and all(torch.equal(state[name], tensors[name]) for name in state)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, state["model.embed_tokens.weight"])
    checkpoint.save(tmp_path, model, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_layers_for_several_tokens_at_once_are_left_out(tmp_path: Path) -> None:
    config = latent()
    state = made(config).state()
    extra = {f"model.layers.3.{name}": torch.zeros(2) for name in ("enorm.weight", "eh_proj.weight")}
    checkpoint.save(tmp_path, state | extra, config)
    assert checkpoint.load(tmp_path)[1].keys() == state.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_has_the_same_bits_packed_and_cached(dtype: str) -> None:
    config = latent(dtype)
    model = made(config)
    lengths = [130, 1, 70]
    ids = tiny.tokens(config, sum(lengths))
    whole = torch.split(model(ids, lengths).detach(), lengths)
    for got, want in zip(decoded(model, list(torch.split(ids, lengths)), first=90, chunk=37), whole, strict=True):
        assert torch.equal(got, want)


def test_every_weight_learns_but_the_correction() -> None:
    config = latent()
    model = made(config)
    state = TrainerState(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = tiny.tokens(config, 200)
    torch.autograd.backward(model.selected_logprobs(model(ids, [120, 80]), ids.flip(0))[0].sum())
    state.apply(1e-3)
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert still == ["layers.1.correction", "layers.2.correction"]
    other = TrainerState(Model(config, tiny.numerics(config), seed=None))
    other.restore(state.tensors(), version=1, step=1)
    assert other.hash() == state.hash()


def test_routes_are_of_the_layers_that_route() -> None:
    config = latent()
    model = made(config)
    ids = tiny.tokens(config, 60)
    rows: list[Tensor] = []
    live = model(ids, [60], recorder=rows)
    routes = torch.stack(rows, 1)
    assert routes.shape == (60, 2, 2)
    assert torch.equal(model(ids, [60], routed=routes.to(torch.uint8)), live)
    with pytest.raises(moe.RoutesMissing, match="do not fit 2 layers"):
        model(ids, [60], routed=torch.zeros(60, 3, 2, dtype=torch.uint8))
    assert moe.from_array(Array.of([1, 2, 3, 4], "|u1", (1, 2, 2)), 2, 2).tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"topk_group": 9}, "9 of 4 groups"),
        ({"num_experts_per_tok": 5}, "top_k 5 is more than the experts of 2 groups"),
        ({"v_head_dim": 40}, "value_dim 40"),
        ({"qk_rope_head_dim": 7}, "odd"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    raw = latent().to_hf()
    assert PolicyConfig.from_hf(raw) == latent()
    with pytest.raises(CheckpointError, match=text):
        PolicyConfig.from_hf(raw | changes)


def test_fields_that_came_later_do_not_change_how_an_older_config_describes_itself() -> None:
    config = tiny.config()
    assert config.described.endswith("tied=False, max_positions=32768)")
    assert "latent=Latent(q_rank=20" in latent().described
