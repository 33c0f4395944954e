"""Between a policy's shape and Hugging Face's config.json, for the model types that this model computes.

    qwen3          dense, q/k norm (experts 0: the degenerate case)
    qwen3_moe      mixture in every layer, softmax scores
    deepseek_v3    latent attention, leading dense layers, sigmoid scores with a correction, groups, shared experts;
                   kimi_k2 is the same under another name

What a checkpoint asks for and this model does not compute is refused by name, never ignored.
"""

from typing import Any

from headrace.policy import rope
from headrace.policy.config import CheckpointError, Latent, PolicyConfig

QWEN = ("qwen3_moe", "qwen3")
DEEPSEEK = ("deepseek_v3", "kimi_k2")

_REFUSED: dict[str, dict[str, Any]] = {
    "qwen": {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "deepseek": {
        "hidden_act": "silu",
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
"""What must be so, where config.json says anything about it."""


def parse(raw: dict[str, Any]) -> PolicyConfig:
    """The content of a config.json. CheckpointError names what is missing or not supported."""
    kind = raw.get("model_type")
    if kind not in QWEN + DEEPSEEK:
        raise CheckpointError(f"model_type {kind!r} is not {', '.join(QWEN)} or {', '.join(DEEPSEEK)}")
    for key, expected in _REFUSED["qwen" if kind in QWEN else "deepseek"].items():
        if raw.get(key, expected) not in (expected, None):
            raise CheckpointError(f"{key} {raw[key]!r} is not supported, only {expected!r}")
    quantised = raw.get("quantization_config") or {}
    if quantised and quantised.get("quant_method") != "mxfp8":
        raise CheckpointError(f"quant_method {quantised.get('quant_method')!r} is not supported, only 'mxfp8'")
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
            "dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
            "eps": raw.get("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope": scaling,
            "tied": bool(raw.get("tie_word_embeddings", False)),
            "max_positions": positions,
            "expert_format": "mxfp8" if quantised else "",
        }
        return PolicyConfig(**shared, **(_qwen(raw) if kind in QWEN else _deepseek(raw)))
    except KeyError as error:
        raise CheckpointError(f"config.json has no {error.args[0]!r}") from None


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
        "experts": raw.get("n_routed_experts") or raw["num_local_experts"],
        "top_k": raw["num_experts_per_tok"],
        "expert_dim": raw["moe_intermediate_size"],
        "normalise_top_k": bool(raw.get("norm_topk_prob", True)),
        "latent": latent,
        "scores": "sigmoid",
        "expert_groups": raw.get("n_group") or 1,
        "kept_groups": raw.get("topk_group") or 1,
        "gate_scale": float(raw.get("routed_scaling_factor", 1.0)),
        "shared_experts": raw.get("n_shared_experts") or 0,
        "dense_layers": min(raw.get("first_k_dense_replace") or 0, raw["num_hidden_layers"]),
        "dense_dim": raw["intermediate_size"],
    }


def spelled(c: PolicyConfig) -> dict[str, Any]:
    """Content of config.json, readable by transformers 4 and 5 and by SGLang."""
    kind = "deepseek_v3" if c.latent else "qwen3_moe" if c.experts else "qwen3"
    names = {"deepseek_v3": "DeepseekV3", "qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3"}
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
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": c.dim,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.dense_dim or c.expert_dim,
        **(_latent(c, c.latent) if c.latent else sparse if c.experts else {}),
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
    if c.latent:
        del out["head_dim"], out["use_sliding_window"], out["sliding_window"]
    if c.expert_format:
        out["quantization_config"] = {"quant_method": c.expert_format, "modules_to_convert": ["mlp.experts"]}
    return out


def _latent(c: PolicyConfig, latent: Latent) -> dict[str, Any]:
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
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
    }
