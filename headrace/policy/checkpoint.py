"""Checkpoint folders in Hugging Face layout: config.json beside safetensors files.

Reads single files and sharded ones (model.safetensors.index.json); writes a single model.safetensors, each file under
a temporary name first, so that a folder never holds half of one.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.model import Model


def save(folder: str | Path, weights: Model | Mapping[str, Tensor], config: PolicyConfig) -> None:
    """Write config.json and model.safetensors. OSError when the disk won't have it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = weights.state() if isinstance(weights, Model) else dict(weights)
    temporary = path / f".model.{os.getpid()}.part"
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        os.replace(temporary, path / "model.safetensors")
        temporary.write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path / "config.json")
    finally:
        temporary.unlink(missing_ok=True)


def load(folder: str | Path) -> tuple[PolicyConfig, dict[str, Tensor]]:
    """Config and tensors under their Hugging Face names. CheckpointError when a part is missing or broken."""
    path = Path(folder)
    config = PolicyConfig.read(path)
    index = path / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            tensors |= load_file(path / name)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: weights cannot be read: {error}") from None
    if config.tied:
        tensors.pop("lm_head.weight", None)
    return config, tensors
