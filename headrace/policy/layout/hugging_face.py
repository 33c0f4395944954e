"""Converts between a policy's shape and Hugging Face's config.json, for the supported model types.

    qwen3          dense, q/k norm (experts 0: the degenerate case)
    qwen3_moe      mixture in every layer, softmax scores
    llama          dense, without q/k norm; Llama 2 and 3, SmolLM2
    qwen2          the same with a bias on q, k and v; Qwen2 and Qwen2.5
    mistral        the same as llama; without a sliding window
    glm4_moe       grouped attention, part of a head rotated, q/k norm and biases as the checkpoint says; the mixture
                   is that of deepseek_v3
    deepseek_v3    latent attention, leading dense layers, sigmoid scores with a correction, groups, shared experts;
                   kimi_k2 is the same under another name

A checkpoint with a field that this model does not support is refused; the error names the field. With `[policy]
provider = "transformers"` any causal model of that library has a shape as well (`policy.hugging.shape`).
"""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config import Config, Policy
from headrace.policy import rope
from headrace.policy.adapters import shape
from headrace.policy.config import Adapter, CheckpointError, Latent, PolicyConfig
from headrace.policy.layout import block_fp8

_QWEN3 = {"attention_bias": False, "use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
_DEEPSEEK3 = {"attention_bias": False, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_REQUIRED: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "llama": {"mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "mistral": {"sliding_window": None},
    "glm4_moe": {},
    "deepseek_v3": _DEEPSEEK3,
    "kimi_k2": _DEEPSEEK3,
}
"""By model type: values that config.json must have where it has the field at all; `hidden_act` is silu for all."""
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "mistral": "Mistral",
    "glm4_moe": "Glm4Moe",
}


_SHAPE = "headrace_shape"
"""The field of config.json, within a run's folder, of a policy of the provider transformers: nobody else has to build
the model to know its shape."""
Provider = Literal["native", "transformers", "auto"]
_ADAPTER = "headrace_adapter"
"""The field of config.json, within a run's folder only: what is exported has no adapter in its config.json."""


_LATENT = {
    **{"max_position_embeddings": 4096, "n_shared_experts": 1, "n_group": 8, "topk_group": 4},
    **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "q_lora_rank": 1536},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4},
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"num_key_value_heads": 32},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "glm4_moe": {
        **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1},
        **{"n_shared_experts": 1, "num_key_value_heads": 8, "head_dim": 128},
    },
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
}
"""By model type: the value of a field that config.json leaves out, where it is not the one of `_READERS`, from
transformers' own class."""


def from_section(section: Policy) -> PolicyConfig:
    """The shape that a [policy] section asks for; its `checkpoint`, a Hugging Face folder, replaces everything else."""
    if section.checkpoint:
        config = read(section.checkpoint, section.provider)
        if config.source and section.expert_format:
            raise CheckpointError("[policy] expert_format is not supported by the provider transformers: leave it out")
        return msgspec.structs.replace(config, expert_format=section.expert_format or config.expert_format)
    fields = {name: getattr(section, name) for name in section.__struct_fields__ if name != "checkpoint"}
    return PolicyConfig(**{name: value for name, value in fields.items() if name in PolicyConfig.__struct_fields__})


def of_run(config: Config) -> PolicyConfig:
    """The shape of a run's policy: that of [policy], with the adapter of [trainer.lora]. CheckpointError, also where a
    part of the run does not compute this policy."""
    section, lora = config.policy, config.trainer.lora
    if section.provider == "auto":
        known = _kind(section.checkpoint) in _REQUIRED if section.checkpoint else True
        provider: Provider = "native" if known and config.engine.exact else "transformers"
        section = msgspec.structs.replace(section, provider=provider)
    if section.provider == "transformers":
        mesh = config.trainer.mesh
        _check(
            "the provider transformers",
            ("[engine] exact", config.engine.exact, False),
            ("[trainer] mesh.expert", mesh.expert, 1),
            ("[trainer] mesh.context", mesh.context, 1),
            ("[numerics] replay_plausible", config.numerics.replay_plausible, 0.0),
        )
        if not section.checkpoint:
            raise CheckpointError(
                "[policy] provider = 'transformers' needs [policy] checkpoint: it makes no new policy"
            )
    policy = from_section(section)
    embedded = ("[engine] kind", config.engine.kind, "embedded")
    process = ("[trainer] mesh: processes", config.trainer.ranks, 1)
    if policy.expert_format == "nvfp4":
        _check("nvfp4 experts", embedded, process, ("[weights] precision", config.weights.precision, "as_trained"))
    if config.algorithm.balance_rate:
        names = [f"layers.{layer}.correction" for layer in range(policy.layers) if policy.sparse(layer)]
        if policy.scores != "sigmoid" or not names:
            raise CheckpointError(
                "[algorithm] balance_rate: expected 0, because this policy has no correction of its router "
                "(e_score_correction_bias), which balancing changes"
            )
        frozen = [pattern for pattern in config.trainer.frozen if fnmatch.filter(names, pattern)]
        precision = ("[weights] precision", config.weights.precision, "as_trained")
        _check("balance_rate", precision, ("[trainer.lora] rank", lora.rank, 0), ("[trainer] frozen", frozen, []))
    if not lora.rank:
        return policy
    return msgspec.structs.replace(policy, adapter=shape.resolved(policy, lora.rank, lora.alpha, lora.targets))


def _check(kind: str, *settings: tuple[str, Any, Any]) -> None:
    """settings: (key, value, supported value)."""
    for key, got, wanted in settings:
        if got != wanted:
            raise CheckpointError(f"{key} = {got!r} is not supported for {kind}, only {wanted!r}")


def raw_of(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's config.json. CheckpointError."""
    path = Path(folder) / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return raw


def _kind(folder: str | Path) -> Any:
    return raw_of(folder).get("model_type")


def read(folder: str | Path, provider: Provider = "auto") -> PolicyConfig:
    """From config.json in a folder, as a provider computes it; auto: native where it knows the type. CheckpointError
    when it is missing, broken or asks for something unsupported."""
    raw = raw_of(folder)
    if _SHAPE in raw:
        shape_of = raw.pop(_SHAPE)
        return msgspec.convert({**shape_of, "source": json.dumps(raw)}, PolicyConfig)
    if provider == "native" or (provider == "auto" and raw.get("model_type") in _REQUIRED):
        return parse(raw)
    from headrace.policy.hugging import shape as library  # it imports transformers

    return library.read(raw, "bfloat16" if _dtype(raw) == "bfloat16" else "float32")


def parse(raw: dict[str, Any]) -> PolicyConfig:
    """The content of a config.json. CheckpointError names what is missing or not supported."""
    kind = raw.get("model_type")
    if kind not in _REQUIRED:
        raise CheckpointError(
            f"model_type {kind!r} is not supported by the provider native, only {', '.join(_REQUIRED)}; "
            "[policy] provider = 'transformers' trains any causal model of transformers, without exact mode"
        )
    for key, expected in {"hidden_act": "silu", **_REQUIRED[kind]}.items():
        if raw.get(key, expected) not in (expected, None):
            raise CheckpointError(f"{key} {raw[key]!r} is not supported, only {expected!r}")
    turned = {**raw, **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}.get(
        "partial_rotary_factor"
    )
    if turned not in (None, 1.0) and kind != "glm4_moe":
        raise CheckpointError(f"partial_rotary_factor {turned} is not supported for {kind}, only 1.0")
    quantised = raw.get("quantization_config") or {}
    readable = (block_fp8.METHOD, "mxfp8", "nvfp4")
    method = quantised.get("quant_method")
    if quantised and method not in readable:
        raise CheckpointError(
            f"quant_method {method!r} is not supported for {kind}, only {', '.join(map(repr, readable))}"
        )
    block_fp8.blocks(raw)
    raw = _DEFAULTS.get(kind, {}) | raw
    positions = raw.get("max_position_embeddings", 32_768)
    try:
        theta, scaling = rope.parse(raw, positions)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        shared: dict[str, Any] = {
            "dim": raw["hidden_size"],
            "layers": raw["num_hidden_layers"],
            "heads": raw["num_attention_heads"],
            "vocab": raw["vocab_size"],
            "dtype": _dtype(raw),
            "eps": raw.get("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope": scaling,
            "tied": bool(raw.get("tie_word_embeddings", False)),
            "max_positions": positions,
            "expert_format": method if method in ("mxfp8", "nvfp4") else "",
            "adapter": msgspec.convert(raw[_ADAPTER], Adapter) if _ADAPTER in raw else None,
        }
        return PolicyConfig(**shared, **_READERS[kind](raw))
    except KeyError as error:
        raise CheckpointError(f"config.json has no {error.args[0]!r}") from None
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config.json, {_ADAPTER}: {error}") from None


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, wherever a config.json has them."""
    return {**raw, **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}


def _dtype(raw: dict[str, Any]) -> str:
    """float16 (Llama 2) is read as float32, which holds its numbers exactly; bfloat16 would not. The published gpt-oss
    name none: their tensors are bfloat16, which holds MXFP4 exactly. Nor need those in eight bits."""
    method = (raw.get("quantization_config") or {}).get("quant_method")
    unnamed = "bfloat16" if method in ("mxfp4", block_fp8.METHOD) else "float32"
    name = str(raw.get("dtype") or raw.get("torch_dtype") or unnamed)
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"dtype {name!r} is not supported, only float32, bfloat16 and float16")
    return "float32" if name == "float16" else name


def _dense(raw: dict[str, Any]) -> dict[str, Any]:
    kind, heads = raw["model_type"], raw["num_attention_heads"]
    biased = bool(raw.get("attention_bias", False)) and kind == "llama"
    return {
        "model_type": kind,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "experts": 0,
        "top_k": 0,
        "expert_dim": raw["intermediate_size"],
        "qk_norm": False,
        "qkv_bias": biased or kind == "qwen2",
        "out_bias": biased,
    }


def _qwen(raw: dict[str, Any]) -> dict[str, Any]:
    sparse, heads = raw["model_type"] == "qwen3_moe", raw["num_attention_heads"]
    return {
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "experts": (raw.get("num_experts") or raw["num_local_experts"]) if sparse else 0,
        "top_k": raw["num_experts_per_tok"] if sparse else 0,
        "expert_dim": raw["moe_intermediate_size"] if sparse else raw["intermediate_size"],
        "normalise_top_k": bool(raw.get("norm_topk_prob", not sparse)),
    }


def _glm(raw: dict[str, Any]) -> dict[str, Any]:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return {
        "model_type": "glm4_moe",
        "kv_heads": raw["num_key_value_heads"],
        "head_dim": head_dim,
        "qk_norm": bool(raw.get("use_qk_norm", False)),
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "rotary_dim": int(head_dim * _rope_fields(raw).get("partial_rotary_factor", 0.5)),
        **_sigmoid_mixture(raw),
    }


def _sigmoid_mixture(raw: dict[str, Any]) -> dict[str, Any]:
    """Sigmoid scores with a correction, groups, shared experts and leading dense layers."""
    return {
        "experts": raw.get("n_routed_experts") or raw["num_local_experts"],
        "top_k": raw["num_experts_per_tok"],
        "expert_dim": raw["moe_intermediate_size"],
        "normalise_top_k": bool(raw.get("norm_topk_prob", True)),
        "scores": "sigmoid",
        "expert_groups": raw.get("n_group") or 1,
        "kept_groups": raw.get("topk_group") or 1,
        "gate_scale": float(raw.get("routed_scaling_factor", 1.0)),
        "shared_experts": raw.get("n_shared_experts") or 0,
        "dense_layers": min(raw.get("first_k_dense_replace") or 0, raw["num_hidden_layers"]),
        "dense_dim": raw["intermediate_size"],
    }


def _deepseek(raw: dict[str, Any]) -> dict[str, Any]:
    latent = Latent(
        q_rank=raw.get("q_lora_rank") or 0,
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        interleaved=bool(raw.get("rope_interleave", True)),
    )
    return {
        "kv_heads": raw["num_attention_heads"],
        "head_dim": latent.nope_dim + latent.rope_dim,
        "latent": latent,
        **_sigmoid_mixture(raw),
    }


_READERS = {
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "llama": _dense,
    "qwen2": _dense,
    "mistral": _dense,
    "glm4_moe": _glm,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
"""By model type: config.json -> the fields of a PolicyConfig that not all of them share."""


def as_json(c: PolicyConfig) -> dict[str, Any]:
    """Content of config.json, readable by transformers 4 and 5 and by SGLang. For a policy of the provider transformers
    its own content, with the shape added."""
    if c.source:
        shape_of = {n: v for n, v in msgspec.to_builtins(c).items() if n != "source" and v is not None}
        return {**json.loads(c.source), _SHAPE: shape_of}
    kind = c.model_type or ("deepseek_v3" if c.latent else "qwen3_moe" if c.experts else "qwen3")
    sparse: dict[str, Any] = {
        "num_experts": c.experts,
        "num_experts_per_tok": c.top_k,
        "moe_intermediate_size": c.expert_dim,
        "norm_topk_prob": c.normalise_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }
    out = {
        "architectures": [f"{_ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": c.dim,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.dense_dim or c.expert_dim,
        **(_sigmoid_fields(c) if c.scores == "sigmoid" else sparse if c.experts else {}),
        **(_latent_fields(c.latent) if c.latent else {}),
        "vocab_size": c.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope.spelled(c.rope_theta, c.rope),
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_positions,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": c.dtype,
        "dtype": c.dtype,
    }
    if kind == "glm4_moe":
        out |= {"attention_bias": c.qkv_bias, "use_qk_norm": c.qk_norm}
        out["partial_rotary_factor"] = out["rope_parameters"]["partial_rotary_factor"] = c.turned / c.head_dim
        del out["use_sliding_window"], out["sliding_window"]
    if kind == "llama":
        out |= {"attention_bias": c.qkv_bias, "mlp_bias": False}
        del out["use_sliding_window"], out["sliding_window"]
    if c.latent:
        del out["head_dim"], out["use_sliding_window"], out["sliding_window"]
    if c.expert_format:
        out["quantization_config"] = {"quant_method": c.expert_format, "modules_to_convert": ["mlp.experts"]}
    if c.adapter:
        out[_ADAPTER] = msgspec.to_builtins(c.adapter)
    return out | older(out)


def older(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under which transformers 4 and servers read what transformers 5 has in others: without them they take a
    default in silence."""
    out: dict[str, Any] = {"torch_dtype": raw["dtype"]} if raw.get("dtype") else {}
    rope = raw.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict):
        out["rope_local_base_freq"] = local.get("rope_theta")
        rope = rope.get("full_attention") or {}
    out |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaled = rope.get("rope_type", "default") != "default"
    told = {key: value for key, value in out.items() if value is not None and not raw.get(key)}
    if rope and not raw.get("rope_scaling"):  # null is told too: some types have another default
        told["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None
    if raw.get("model_type") == "deepseek_v3":  # transformers knows no other; vLLM takes softmax
        told |= {key: _DEEPSEEK3[key] for key in ("scoring_func", "topk_method") if key not in raw}
    return told


def _sigmoid_fields(c: PolicyConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.top_k,
        "moe_intermediate_size": c.expert_dim,
        "norm_topk_prob": c.normalise_top_k,
        "n_shared_experts": c.shared_experts,
        "n_group": c.expert_groups,
        "topk_group": c.kept_groups,
        "routed_scaling_factor": c.gate_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "first_k_dense_replace": c.dense_layers,
        "num_nextn_predict_layers": 0,
    }


def _latent_fields(latent: Latent) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
    }
