"""The shape of a policy of transformers: what a run must know of it before and besides its forward pass."""

import json
from typing import Any

import torch
from torch import nn

from headrace.policy.config import CheckpointError, Dtype, PolicyConfig
from headrace.policy.hugging import library
from headrace.policy.hugging.routing import Selection
from headrace.policy.layout import block_fp8

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "experts_per_token", "num_experts_per_token")


def read(raw: dict[str, Any], dtype: Dtype) -> PolicyConfig:
    """The shape of a config.json. CheckpointError when transformers does not know it, or when its weights are
    quantised in another form than blocks of eight bits and MXFP4, which the library reads as bfloat16 (gpt-oss)."""
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if "quantization_config" in raw and method != "mxfp4" and block_fp8.blocks(raw) is None:
        raise CheckpointError(
            f"quant_method {method!r} is not trained by the provider transformers; take the checkpoint in bfloat16"
        )
    source = json.dumps({key: value for key, value in raw.items() if key != "quantization_config"})
    model = library.skeleton(source, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    text, blocks = model.config.get_text_config(), library.blocks(model)
    if not blocks:
        raise CheckpointError(
            f"model_type {raw['model_type']!r} of transformers does not name the classes of its blocks"
        )
    heads = _of(text, "num_attention_heads") or 1
    experts, k = (
        next(filter(None, (_of(text, n) for n in _EXPERTS)), 0),
        next(filter(None, (_of(text, n) for n in _TOP_K)), 0),
    )
    kinds = library.router_kinds(model)
    routers = [parent for block in blocks if (parent := library.parent(block, kinds)) is not None]
    replayed = bool(routers) and bool(k) and all(_selects(each, experts, k, text.hidden_size) for each in routers)
    total = sum(parameter.numel() for parameter in model.parameters())
    inside = {id(p): p.numel() for each in routers for p in each.parameters() if p.dim() == 3 and p.shape[0] == experts}
    return PolicyConfig(
        dim=text.hidden_size,
        layers=len(blocks),
        heads=heads,
        kv_heads=_of(text, "num_key_value_heads") or heads,
        head_dim=_of(text, "head_dim") or text.hidden_size // heads,
        experts=experts if replayed else 0,
        top_k=k if replayed else 0,
        expert_dim=_of(text, "moe_intermediate_size") or _of(text, "intermediate_size") or text.hidden_size,
        vocab=text.vocab_size,
        dtype=dtype,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        max_positions=_of(text, "max_position_embeddings") or 32_768,
        dense_layers=len(blocks) - len(routers) if replayed else 0,
        source=source,
        counted=(total, sum(inside.values())),
        live_routers=0 if replayed else len(routers),
    )


def _of(config: Any, name: str) -> int:
    """A number of a config; 0 where it has none. One number for each layer counts as their largest."""
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        value = max((each for each in value if isinstance(each, int)), default=0)
    return value if isinstance(value, int) else 0


def _selects(module: nn.Module, experts: int, k: int, width: int) -> bool:
    """Whether a mixture calls `torch.topk` of k among its experts. On the device meta experts may fail behind it."""
    dtype = next(module.parameters()).dtype
    selection = Selection(experts, k)
    try:
        with selection, torch.no_grad():
            module(torch.empty(1, 3, width, device="meta", dtype=dtype))
    except Exception:
        return selection.chosen is not None
    return selection.chosen is not None
