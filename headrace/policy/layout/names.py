"""Hugging Face names for the parts of the model's fused parameters.

Layout: fused tensors are cut into views, so that what is written through a name lands in the parameter. The names are
those of the published checkpoints: one tensor per projection and expert.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from headrace.policy.adapters import low_rank
from headrace.policy.config import CheckpointError, Latent, PolicyConfig


def views(c: PolicyConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face name -> the part of a parameter that it names. parameters: their data under our names."""
    out = {"model.embed_tokens.weight": parameters["embedding"], "model.norm.weight": parameters["norm"]}
    if not c.tied:
        out["lm_head.weight"] = parameters["head"]
    for index in range(c.layers):
        head = f"layers.{index}."
        layer = {name[len(head) :]: value for name, value in parameters.items() if name.startswith(head)}
        at = f"model.{head}"
        out |= low_rank.views(c, layer, index, at)
        out[at + "input_layernorm.weight"] = layer["attention_norm"]
        out[at + "post_attention_layernorm.weight"] = layer["mlp_norm"]
        out |= _latent(layer, c.latent, at) if c.latent else _grouped(layer, c, at)
        out[at + "self_attn.o_proj.weight"] = layer["out"]
        if c.out_bias:
            out[at + "self_attn.o_proj.bias"] = layer["out_bias"]
        if not c.sparse(index):
            out |= _mlp(layer["gate_up"], layer["down"], at + "mlp.")
            continue
        out[at + "mlp.gate.weight"] = layer["router"]
        if "correction" in layer:
            out[at + "mlp.gate.e_score_correction_bias"] = layer["correction"]
        for expert in range(c.experts):
            out |= _mlp(layer["gate_up"][expert], layer["down"][expert], f"{at}mlp.experts.{expert}.")
        if c.shared_experts:
            out |= _mlp(layer["shared_gate_up"], layer["shared_down"], at + "mlp.shared_experts.")
    return out


def check_names(missing: Collection[str], extra: Collection[str]) -> None:
    """CheckpointError when tensors of the model are missing or others are left over."""
    if extra or missing:
        first = sorted(extra or missing)[0]
        raise CheckpointError(
            f"{len(missing)} tensors are missing and {len(extra)} are not of this model; the first is {first}"
        )


def _mlp(gate_up: Tensor, down: Tensor, at: str) -> dict[str, Tensor]:
    gate, up = torch.chunk(gate_up, 2)
    return {at + "gate_proj.weight": gate, at + "up_proj.weight": up, at + "down_proj.weight": down}


def _grouped(layer: Mapping[str, Tensor], c: PolicyConfig, at: str) -> dict[str, Tensor]:
    widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    out: dict[str, Tensor] = {}
    for kind, fused in (("weight", "qkv"), ("bias", "qkv_bias")):
        if fused in layer:
            parts = torch.split(layer[fused], widths)
            out |= {f"{at}self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    if c.qk_norm:
        out[at + "self_attn.q_norm.weight"] = layer["q_norm"]
        out[at + "self_attn.k_norm.weight"] = layer["k_norm"]
    return out


def _latent(layer: Mapping[str, Tensor], latent: Latent, at: str) -> dict[str, Tensor]:
    names = {"kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj"}
    if latent.q_rank:
        names |= {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj"}
    else:
        names |= {"q": "q_proj"}
    return {f"{at}self_attn.{theirs}.weight": layer[ours] for ours, theirs in names.items()}
