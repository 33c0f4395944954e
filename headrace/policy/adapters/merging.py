"""A PEFT folder (LoRA) merged into the checkpoint under it: a folder to begin a run with.

W + scale B A is computed in float32 and rounded once, one file of the checkpoint after the other.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.policy.config import CheckpointError
from headrace.policy.layout import checkpoint, hugging_face

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "base_model.model."
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")


def merge(folder: Path, target: Path, base: Path | None = None) -> int:
    """Write `target`: the files of the checkpoint with the adapter of a PEFT folder in its weights, and the folder's
    own tokenizer files where it has them. Returns the number of changed tensors.

    base: the checkpoint, where the one that the adapter names is not here. CheckpointError where a file cannot be
    read, and for a kind of adapter that this does not add up.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        changes = load_file(folder / WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} is no PEFT folder: {error}") from None
    if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
        kind = "DoRA" if settings.get("use_dora") else settings.get("peft_type")
        raise CheckpointError(f"{folder / SETTINGS}: expected an adapter of the kind LORA, got {kind!r}")
    source = base or Path(str(settings.get("base_model_name_or_path")))
    if not source.is_dir():
        raise CheckpointError(
            f"there is no folder {source}, the checkpoint that {folder} belongs on: name it by --base"
        )
    if hugging_face.raw_of(source).get("quantization_config"):
        raise CheckpointError(f"{source} is quantised: an adapter is added to plain numbers")
    if target.exists():
        raise CheckpointError(f"{target} exists: expected a new folder")
    left = {name.removeprefix(_HEAD): value for name, value in changes.items()}
    count, part = 0, target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.pth", "*.gguf"))
    for file in checkpoint.files(source):
        tensors = load_file(file)
        for name in tensors:
            before = len(left)
            tensors[name] = _changed(name, tensors[name], left, settings)
            count += len(left) < before
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / file.name, {"format": "pt"})
    if left:
        shutil.rmtree(part)
        raise CheckpointError(f"{folder}: {len(left)} tensors change nothing of {source}; the first is {min(left)}")
    for file in folder.iterdir():  # a tokenizer with added tokens, a chat template
        if file.is_file() and file.name not in (SETTINGS, WEIGHTS, "README.md"):
            shutil.copyfile(file, part / file.name)
    part.rename(target)
    return count


def _changed(name: str, tensor: Tensor, left: dict[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """A tensor of the checkpoint with its change, which is taken out of `left`."""
    module, _, kind = name.rpartition(".")
    for whole in (name, f"{module}.base_layer.{kind}"):  # trained whole, such as a head; or saved with its change
        if whole in left:
            tensor = _fitting(name, tensor, left.pop(whole)).to(tensor.dtype)
    for first, second in (("lora_A.weight", "lora_B.weight"), _EMBEDDING):
        if kind != "weight" or f"{module}.{first}" not in left or f"{module}.{second}" not in left:
            continue
        a, b = left.pop(f"{module}.{first}").float(), left.pop(f"{module}.{second}").float()
        product = b @ a
        if first in _EMBEDDING or settings.get("fan_in_fan_out"):
            product = product.T
        change = _fitting(name, tensor, product) * _scale(module, a.shape[0], settings)
        return (tensor.float() + change).to(tensor.dtype)
    return tensor


def _scale(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """The factor of B A in a module, which may have an alpha of its own."""
    alpha = settings.get("lora_alpha", rank)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _fitting(name: str, tensor: Tensor, other: Tensor) -> Tensor:
    if tensor.shape != other.shape:
        raise CheckpointError(f"{name}: expected a change of shape {list(tensor.shape)}, got {list(other.shape)}")
    return other
