"""Published model families against transformers: logits of random tiny models of each architecture and rope scaling."""

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
from headrace.policy import moe
from headrace.policy.config import CheckpointError, Latent, PolicyConfig
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.rope import RopeScaling
from headrace.training.state import TrainerState
from tests.policy.test_model import decoded
from tests.support import tiny

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
    """A random model of transformers whose norms and corrections affect the logits."""
    torch.manual_seed(3)
    kinds: dict[str, Any] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config, model = kinds[kind]
    out = model(config(**fields)).eval()
    with torch.no_grad():
        named: dict[str, Tensor] = out.state_dict()
        for name, value in named.items():
            if "norm" in name or name.endswith("bias"):
                value.add_(torch.randn_like(value) * 0.2)
    return out


def compared(folder: Path, model: Any, ids: Tensor) -> None:
    """Logits within 1e-4 and the same experts for every token."""
    routes: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
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
    for recorded, other in zip(recorder, routes, strict=True):
        assert torch.equal(recorded.sort(-1).values, other)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_qwen3_is_the_degenerate_case(tmp_path: Path, rope: str, tied: bool) -> None:
    model = theirs("qwen3", QWEN | {"rope_parameters": ROPES[rope], "tie_word_embeddings": tied})
    model.save_pretrained(tmp_path)
    compared(tmp_path, model, tiny.tokens(hugging_face.read(tmp_path), 150))


DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": ROPES["llama3"], "rms_norm_eps": 1e-5, "head_dim": 12}),
    "llama_tied": (
        "llama",
        {"tie_word_embeddings": True, "head_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama_biased": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_architectures_give_their_logits_and_go_out_again(tmp_path: Path, case: str) -> None:
    kind, changes = DENSE[case]
    fields = {name: value for name, value in QWEN.items() if name != "head_dim"}
    model = theirs(kind, fields | changes)
    model.save_pretrained(tmp_path / "in")
    config, tensors = checkpoint.load(tmp_path / "in")
    assert config.model_type == kind
    ids = tiny.tokens(config, 150)
    compared(tmp_path / "in", model, ids)
    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(tensors)
    checkpoint.save(tmp_path / "out", mine, config)
    assert hugging_face.read(tmp_path / "out") == config
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids[None]).logits, model(ids[None]).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_and_missing_norms_keep_the_bits_packed_and_cached_and_learn(dtype: str) -> None:
    config = tiny.config(dtype, experts=0, top_k=0, qk_norm=False, qkv_bias=True, out_bias=True, model_type="llama")  # type: ignore[arg-type]
    model = tiny.model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any()
                parameter.copy_(torch.linspace(-0.5, 0.5, len(parameter)))
    lengths = [130, 1, 70]
    ids = tiny.tokens(config, sum(lengths))
    whole = model(ids, lengths)
    for got, want in zip(
        decoded(model, list(torch.split(ids, lengths)), first=90, chunk=37),
        torch.split(whole.detach(), lengths),
        strict=True,
    ):
        assert torch.equal(got, want)
    torch.autograd.backward(model.selected_logprobs(whole, ids.flip(0))[0].sum())
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_half_precision_is_read_without_loss(tmp_path: Path) -> None:
    """Llama 2 was published in float16."""
    model = theirs("llama", {name: value for name, value in QWEN.items() if name != "head_dim"}).half()
    model.save_pretrained(tmp_path)
    config, tensors = checkpoint.load(tmp_path)
    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(tensors)
    assert config.dtype == "float32"
    assert all(torch.equal(value, tensors[name].float()) for name, value in mine.state().items())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"mlp_bias": True}),
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"dtype": "float8_e4m3fn"}),
        ("gemma3_text", {"model_type": "gemma3_text"}),
    ],
)
def test_dense_architectures_are_refused_by_the_name_of_what_is_missing(kind: str, changes: dict[str, Any]) -> None:
    raw = {**QWEN, "model_type": kind}
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        hugging_face.parse(raw | changes)


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
    compared(tmp_path, model, tiny.tokens(hugging_face.read(tmp_path), 150))


GLM: dict[str, Any] = {
    name: value
    for name, value in DEEPSEEK.items()
    if not name.endswith(("_lora_rank", "_head_dim")) and name != "num_key_value_heads"
} | {"num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_qk_norm": True, "attention_bias": True}, {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}}],
    ids=["plain", "norms_and_biases", "yarn"],
)
def test_a_glm4_moe_gives_its_logits_and_its_experts_and_goes_out_again(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = theirs("glm4_moe", GLM | changes)
    model.save_pretrained(tmp_path / "in")
    config, tensors = checkpoint.load(tmp_path / "in")
    assert config.rotary_dim == (4 if "rope_parameters" in changes else 8)
    ids = tiny.tokens(config, 150)
    compared(tmp_path / "in", model, ids)
    checkpoint.save(tmp_path / "out", tensors, config)
    assert hugging_face.read(tmp_path / "out") == config
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    compared(tmp_path / "out", again.eval(), ids)
    whole = Model(config, tiny.numerics(config), seed=3)
    lengths = [130, 20]
    hidden = torch.split(whole(ids, lengths).detach(), lengths)
    for got, want in zip(decoded(whole, list(torch.split(ids, lengths)), first=90, chunk=37), hidden, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["latent", "yarn"])
def test_our_checkpoint_loads_in_transformers(tmp_path: Path, kind: str) -> None:
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0)
    config = latent() if kind == "latent" else msgspec.structs.replace(tiny.config(), rope=scaling)
    model = made(config)
    checkpoint.save(tmp_path, model, config)
    assert hugging_face.read(tmp_path) == config
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
        ({"topk_group": 9}, "got 9, 4 and 8"),
        ({"num_experts_per_tok": 5}, "top_k 5 is more than the experts of 2 groups"),
        ({"v_head_dim": 40}, "value_dim 40"),
        ({"qk_rope_head_dim": 7}, "even head_dim.*got 7"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    raw = hugging_face.as_json(latent())
    assert hugging_face.parse(raw) == latent()
    with pytest.raises(CheckpointError, match=text):
        hugging_face.parse(raw | changes)


def test_fields_that_came_later_do_not_change_how_an_older_config_describes_itself() -> None:
    config = tiny.config()
    assert config.described.endswith("tied=False, max_positions=32768)")
    assert "latent=Latent(q_rank=20" in latent().described
