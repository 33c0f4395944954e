"""Model folders of the true shape: the published config.json, and shards whose headers have the true names and sizes.

The shards are sparse files, so a folder of 61 GB takes a few MiB. Their tensors are zeros.
"""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

from headrace.policy.layout import hugging_face
from headrace.policy.layout.checkpoint import SHARD_BYTES
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from tests.support import chat_formats

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen3",
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-4B-Instruct-2507": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "max_window_layers": 36,
        "max_position_embeddings": 262144, "rope_theta": 5000000, "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "max_window_layers": 36,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": False,
    },
    "Qwen3-Coder-30B-A3B-Instruct": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 5472, "moe_intermediate_size": 768, "num_hidden_layers": 48, "max_window_layers": 28,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""As published, by name."""
GENERATION = {"do_sample": True, "eos_token_id": [500, 501], "temperature": 0.7, "top_p": 0.8, "top_k": 20}


def folder(root: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    """The folder of a published model, or of one with this config.json; its tokenizer is tiny."""
    path = root / name
    path.mkdir(parents=True)
    raw = config or CONFIGS[name]
    stops = [json.loads(chat_formats.tokenizer_json())["added_tokens"][2]["id"]]
    for file, content in {
        "config.json": raw | {"eos_token_id": stops[0]},
        "generation_config.json": GENERATION | {"eos_token_id": stops},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    }.items():
        (path / file).write_text(json.dumps(content, indent=2))
    (path / "tokenizer.json").write_text(chat_formats.tokenizer_json())
    (path / "chat_template.jinja").write_text(chat_formats.CHATML)
    weights(path, raw)
    return path


def weights(path: Path, raw: dict[str, Any]) -> None:
    """The shards and their index."""
    parts: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
    left = SHARD_BYTES
    kind, size = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}[str(raw.get("torch_dtype") or raw.get("dtype"))]
    for name, shape, count in shapes(json.dumps(raw)):
        if parts[-1] and count * size > left:
            parts.append([])
            left = SHARD_BYTES
        parts[-1].append((name, shape, count * size))
        left -= count * size
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape, nbytes in part:
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            index[name] = file
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (path / file).open("wb") as shard:
            shard.write(struct.pack("<Q", len(text)) + text)
            shard.truncate(8 + len(text) + at)
    if len(parts) > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@cache
def shapes(raw: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and number of elements of every tensor."""
    numerics = Numerics(exact=False, reason="it computes nothing", fingerprint="")
    views = Model(hugging_face.parse(json.loads(raw)), numerics, seed=None, device="meta").views()
    return [(name, tuple(view.shape), view.numel()) for name, view in views.items()]
