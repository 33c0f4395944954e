"""Computes the checksums that a server must report from a file whose state hash was verified.

Idea: /weights_checker hashes the bits that the server computes with, under its fused names. This module fuses the
file's tensors in the same way (query, key and value; gate and up of all experts; the vocabulary padded to a multiple of
64 rows), hashes them with the same function, and compares. Equality proves that the server serves the version that the
trainer published, after any number of updates in place.

On the CPU the server's hash of a tensor is the first eight bytes of SHA-256 over its bits. On a GPU it is another
function, and with tensor parallelism each rank holds a part; neither is computed here (docs/sglang.md).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.policy.config import PolicyConfig
from headrace.weights import snapshot

VOCAB_PAD = 64


def known(config: PolicyConfig) -> bool:
    """Whether the server's layout of this model is known here: Qwen3, with all layers dense or all layers a mixture."""
    return (
        config.model_type == ""
        and config.latent is None
        and not (config.dense_layers or config.shared_experts or config.expert_format)
    )


def expected(path: str | Path, config: PolicyConfig, dtype: str) -> dict[str, str]:
    """The checksums (16 hex digits) by fused name, of a snapshot file that a server on the CPU holds in `dtype`."""
    kind = getattr(torch, dtype)
    return {name: digest(tensor.to(kind)) for name, tensor in fused(snapshot.read(path), config).items()}


def fused(tensors: Mapping[str, Tensor], config: PolicyConfig) -> dict[str, Tensor]:
    """Hugging Face tensors under the names and in the layout of SGLang's Qwen3 models on one rank."""
    out: dict[str, Tensor] = {"model.norm.weight": tensors["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            out[name] = F.pad(tensors[name], (0, 0, 0, -config.vocab % VOCAB_PAD))
    for index in range(config.layers):
        at = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"]
        for name in ("q_norm", "k_norm", "o_proj"):
            out[f"{at}self_attn.{name}.weight"] = tensors[f"{at}self_attn.{name}.weight"]
        out[f"{at}self_attn.qkv_proj.weight"] = torch.cat([tensors[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"])
        if config.experts:
            experts = [f"{at}mlp.experts.{expert}." for expert in range(config.experts)]
            out[f"{at}mlp.gate.weight"] = tensors[f"{at}mlp.gate.weight"]
            out[f"{at}mlp.experts.w13_weight"] = torch.stack([_gate_up(tensors, name) for name in experts])
            out[f"{at}mlp.experts.w2_weight"] = torch.stack([tensors[f"{n}down_proj.weight"] for n in experts])
        else:
            out[f"{at}mlp.gate_up_proj.weight"] = _gate_up(tensors, f"{at}mlp.")
            out[f"{at}mlp.down_proj.weight"] = tensors[f"{at}mlp.down_proj.weight"]
    return out


def _gate_up(tensors: Mapping[str, Tensor], at: str) -> Tensor:
    return torch.cat([tensors[f"{at}gate_proj.weight"], tensors[f"{at}up_proj.weight"]])


def digest(tensor: Tensor) -> str:
    """The server's checksum of a tensor on the CPU."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(bits.data).digest()[:8].hex()


def difference(wanted: Mapping[str, str], served: Mapping[str, str]) -> str:
    """A text about the first difference; empty when every tensor is there with its bits."""
    wrong = sorted(name for name in wanted if served.get(name) != wanted[name])
    extra = sorted(name for name in served if name not in wanted and not name.endswith("_cache"))
    if wrong:
        state = "is missing" if wrong[0] not in served else "has other bits"
        return f"{len(wrong)} of {len(wanted)} tensors in the server differ from the version's; {wrong[0]} {state}"
    return f"the server holds {len(extra)} tensors that the version has not, such as {extra[0]}" if extra else ""
