"""Weights of a policy of transformers as a folder like the one that the run began with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.hugging.model import HuggingModel
from headrace.policy.numerics import Numerics

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5")


def save(target: Path, tensors: Mapping[str, Tensor], config: PolicyConfig, source: Path, shard_bytes: int) -> None:
    """Write weights and config.json by `save_pretrained`, and the other files of the folder `source` as they are.
    CheckpointError when that folder is gone."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is not there: an export has the other files of the folder that the run began with"
        )
    model = HuggingModel(config, Numerics(exact=False, reason="it computes nothing", fingerprint=""))
    model.load_state(tensors)
    model.inner.save_pretrained(target, max_shard_size=shard_bytes)
    written = json.loads((target / "config.json").read_text(encoding="utf-8"))
    raw = json.loads(config.source)
    if raw.get("model_type") == written["model_type"]:  # else a part alone of the source's model is trained
        written = raw | {key: written[key] for key in ("architectures", "dtype", "transformers_version")}
    text = json.dumps(written | _older(written), indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    weights = {path for pattern in _WEIGHTS for path in source.rglob(pattern)}
    for path in sorted(set(source.rglob("*")) - weights):
        there = target / path.relative_to(source)
        if path.is_file() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)


def _older(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under which transformers 4 and servers read what transformers 5 has in others: without them they take a
    default in silence."""
    out: dict[str, Any] = {"torch_dtype": raw["dtype"]} if raw.get("dtype") else {}
    rope = raw.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict):
        out["rope_local_base_freq"] = local.get("rope_theta")
        rope = rope.get("full_attention") or {}
    out |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaled = rope.get("rope_type", "default") != "default"
    told = {key: value for key, value in out.items() if value is not None and not raw.get(key)}
    if rope and not raw.get("rope_scaling"):  # null is told too: some types have another default
        told["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None
    return told
