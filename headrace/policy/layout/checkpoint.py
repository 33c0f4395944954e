"""Checkpoint folders in Hugging Face layout: config.json beside safetensors files.

Reads and writes single files and sharded ones (model.safetensors.index.json). Each file is written under a temporary
name first and the index after the shards it names, so that a folder never holds half of one.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.inner_paths import is_inner
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import block_fp8, hugging_face
from headrace.policy.seam import PolicyModel

SHARD_BYTES = 5 << 30
"""Bytes of tensors in a file, at most, unless one tensor alone is larger."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def save(
    folder: str | Path,
    weights: PolicyModel | Mapping[str, Tensor],
    config: PolicyConfig,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and model.safetensors, or shards of at most `shard_bytes` and their index.

    Files of an earlier save that this one does not name are removed. OSError when the files cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = weights.state() if isinstance(weights, PolicyModel) else dict(weights)
    parts = shards(tensors, shard_bytes)
    files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    if len(parts) == 1:
        files = [_SINGLE]
    for file, names in zip(files, parts, strict=True):
        _write(path / file, {name: tensors[name].contiguous() for name in names})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, parts, strict=True) for name in names},
        }
        _write(path / _INDEX, index)
    else:
        (path / _INDEX).unlink(missing_ok=True)
    for other in path.glob("model*.safetensors"):
        if other.name not in files:
            other.unlink()
    _write(path / "config.json", hugging_face.as_json(config))


def shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in their order, cut into parts of at most `limit` bytes; at least one part."""
    parts: list[list[str]] = [[]]
    left = limit
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > left:
            parts.append([])
            left = limit
        parts[-1].append(name)
        left -= tensor.nbytes
    return parts


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write tensors or JSON, by the name's ending, under a temporary name first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.suffix == ".json":
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        else:
            save_file(content, temporary, {"format": "pt"})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def files(path: Path) -> list[Path]:
    """The files with the tensors of a folder, sorted by name; a file is its own. OSError, ValueError, KeyError when the
    index of shards cannot be read."""
    if not path.is_dir():
        return [path]
    names, index = {_SINGLE}, path / _INDEX
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in names:
        if not isinstance(name, str) or not is_inner(name):
            raise ValueError(f"{path / _INDEX} names {name!a:.80}, which is no file of the folder")
    return [path / name for name in sorted(names)]


def not_of_run(config: PolicyConfig, names: Iterable[str]) -> list[str]:
    """Names of a folder's tensors that a run leaves out: a head that is the embedding, and layers beyond the decoder's
    own (multi-token prediction in DeepSeek-V3 and GLM-4.5)."""
    layer = re.compile(r"model\.layers\.(\d+)\.")

    def beyond(name: str) -> bool:
        match = layer.match(name)
        return config.scores == "sigmoid" and match is not None and int(match[1]) >= config.layers

    return [name for name in names if (config.tied and name == "lm_head.weight") or beyond(name)]


def load(folder: str | Path) -> tuple[PolicyConfig, dict[str, Tensor]]:
    """Config and tensors under their Hugging Face names, without `not_of_run`. CheckpointError when a part is missing
    or broken."""
    path = Path(folder)
    config = hugging_face.read(path, "native")
    try:
        tensors: dict[str, Tensor] = {}
        for file in files(path):
            tensors |= load_file(file)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: weights cannot be read: {error}") from None
    for name in not_of_run(config, tensors):
        del tensors[name]
    return config, block_fp8.inward(tensors, block_fp8.blocks(hugging_face.raw_of(path)), config.torch_dtype)
