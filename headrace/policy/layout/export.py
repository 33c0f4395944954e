"""A published version as a Hugging Face folder, for transformers and every server that reads its layout.

Idea: tokenizer, chat template and generation settings come from the run's renderer bundle, which the policy was trained
with, and not from the folder of the checkpoint that the run started with, which may have changed or gone since.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from headrace.messages.rollout import RendererBundle
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.provider import merged


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an export."""

    config: PolicyConfig
    tensors: Mapping[str, Tensor]
    """Weights under Hugging Face names, float32 or bfloat16; adapters among them are merged."""
    bundle: RendererBundle
    card: str
    """The model card, Markdown."""
    stops: tuple[int, ...]
    """The ids that end a turn of the run: the checkpoint's and the chat template's."""
    source: str = ""
    """The folder that the run began with; needed for a policy of the provider transformers alone."""


def export(parts: Export, target: Path, shard_bytes: int = checkpoint.SHARD_BYTES) -> PolicyConfig:
    """Write config.json, weights, tokenizer files, generation settings and README.md; returns the shape as written.

    The weights keep their dtype; experts are written as plain tensors, whatever format they were served in.
    CheckpointError when the target is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: expected a new folder")
    if parts.config.source:
        from headrace.policy.hugging import export as library  # it imports transformers

        config = msgspec.structs.replace(parts.config, adapter=None)
        library.save(target, merged(parts.config, parts.tensors), config, Path(parts.source), shard_bytes)
    else:
        config = msgspec.structs.replace(parts.config, dtype=_dtype(parts.tensors), expert_format="", adapter=None)
        checkpoint.save(target, merged(parts.config, parts.tensors), config, shard_bytes=shard_bytes)
    (target / "tokenizer.json").write_text(parts.bundle.tokenizer_json, encoding="utf-8")
    for name, content in _settings(parts, config).items():
        there = target / name
        if config.source and there.exists():  # what the folder had besides stays
            content = json.loads(there.read_text(encoding="utf-8")) | content
        there.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (target / "README.md").write_text(parts.card, encoding="utf-8")
    return config


def _settings(parts: Export, config: PolicyConfig) -> dict[str, dict[str, Any]]:
    """File name -> content: tokenizer_config.json and generation_config.json."""
    bundle = parts.bundle
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        **bundle.special_tokens,
    }
    if bundle.chat_template:
        settings["chat_template"] = bundle.chat_template
    generation = bundle.generation | {"eos_token_id": list(parts.stops)}
    return {"tokenizer_config.json": settings, "generation_config.json": generation}


def _dtype(tensors: Mapping[str, Tensor]) -> Literal["float32", "bfloat16"]:
    """The dtype of the embedding is that of the model; a correction stays float32 beside it."""
    return "bfloat16" if tensors["model.embed_tokens.weight"].dtype == torch.bfloat16 else "float32"
