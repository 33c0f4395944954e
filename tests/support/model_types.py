"""Random tiny models of transformers' types: one table of [type, fields of its config]."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.config import Algorithm
from headrace.policy.config import PolicyConfig
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Recipe

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = BASE | {"head_dim": 8}
WINDOW = HEAD | {"sliding_window": 6}
MIXTURE = HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPS = HEAD | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {name: value for name, value in GROUPS.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GEMMA = WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = MIXTURE | {"shared_expert_intermediate_size": 16}
TYPES: dict[str, dict[str, Any]] = {
    "apertus": BASE,
    "arcee": BASE,
    "cohere": BASE,
    "cohere2": WINDOW,
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc"},
    "dots1": GROUPS,
    "ernie4_5": HEAD,
    "ernie4_5_moe": HEAD | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "exaone4": WINDOW,
    "gemma": HEAD,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT,
    "gpt_neox": {name: value for name, value in BASE.items() if name != "num_key_value_heads"},
    "gpt_oss": LOCAL | {"sliding_window": 6},
    "granite": BASE | {"logits_scaling": 2.0},
    "granitemoe": LOCAL,
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": LOCAL | {"num_experts": 4, "moe_topk": 2},
    "lfm2": BASE
    | {"layer_types": ["conv", "full_attention"], "conv_dim": 32, "block_dim": 32, "block_auto_adjust_ff_dim": False},
    "llama": BASE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama4_text": LOCAL | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1, "attention_chunk_size": 8},
    "minimax_m2": LOCAL | {"rotary_dim": 4, "scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": HEAD,
    "mistral": WINDOW,
    "mixtral": LOCAL,
    "nemotron": BASE,
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": WINDOW,
    "olmoe": MIXTURE,
    "phi": BASE,
    "phi3": BASE,
    "phimoe": LOCAL,
    "qwen2": BASE,
    "qwen2_moe": SHARED,
    "qwen3": HEAD,
    "qwen3_5_moe_text": SHARED | DELTA,
    "qwen3_5_text": HEAD | DELTA,
    "qwen3_moe": MIXTURE,
    "qwen3_next": SHARED | DELTA,
    "seed_oss": HEAD,
    "smollm3": BASE,
    "stablelm": BASE,
    "starcoder2": BASE,
}
LENGTHS = (7, 13, 12, 5)
CLIP, HEAT = 2.0, 0.7
RECIPE = Recipe(
    Algorithm(weighting="truncated", tis_clip=CLIP, constant_tokens=0, learning_rate=1e-2, warmup_steps=1), 64, 1
)
QUICK = ("gemma3_text", "mixtral", "qwen3_5_text")
"""The types of the default suite: windows and scaled embeddings; a mixture; a recurrent state."""


WIDE = {
    "hidden_size": 128,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "attention_chunk_size": 128,
    "conv_dim": 128,
    "block_dim": 128,
    "rotary_dim": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""The sizes that kernels of servers have."""


def folder(path: Path, kind: str, *, wide: bool = False, **changes: int) -> Path:
    """A checkpoint of random weights, with a file that no library writes. wide: in the sizes of `WIDE`. changes: other
    values of some fields."""
    torch.manual_seed(1)
    fields = TYPES[kind] | {name: value for name, value in WIDE.items() if wide and name in TYPES[kind]}
    fields |= changes
    rope = fields.pop("rope_scaling", None)
    config = transformers.AutoConfig.for_model(kind, **fields)
    if rope is not None:
        config.rope_parameters = {"rope_theta": 10_000.0, **rope}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # corrections of routers, which the library makes zeros
                buffer.add_(torch.randn_like(buffer) * 0.05)
    model.save_pretrained(path)
    (path / "notes").mkdir()
    (path / "notes" / "LICENSE").write_text(json.dumps({"kind": kind}))
    return path


def plain(path: Path) -> Any:
    """The folder's model as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def segments(shape: PolicyConfig, seed: int = 3) -> list[Segment]:
    """Sequences whose second half is sampled, with routes that the policy would not choose."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for index, length in enumerate(LENGTHS):
        sampled = length // 2
        routed = torch.rand(length, shape.sparse_layers, max(1, shape.experts), generator=draw).argsort(-1)
        out.append(
            Segment(
                trajectory=f"t{index}",
                ids=torch.randint(3, shape.vocab, (length,), generator=draw),
                positions=torch.arange(length - sampled, length),
                targets=torch.randint(3, shape.vocab, (sampled,), generator=draw),
                behaviour=-4.5 + torch.rand(sampled, generator=draw),
                versions=torch.zeros(sampled, dtype=torch.int64),
                routed=routed[..., : shape.top_k] if shape.experts else None,
                spans=(),
                advantage=1.0 + index,  # of one sign: a sum that cancels has no relative error of its own
                temperature=HEAT,
                index=index,
            )
        )
    return out


def batch(parts: list[Segment]) -> Batch:
    return Batch(tuple(parts), len(parts), (0.5,) * len(parts), 0, ("g",), frozenset({""}))
