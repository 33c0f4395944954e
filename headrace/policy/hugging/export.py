"""Weights of a policy of transformers as a folder like the one that the run began with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.hugging import library
from headrace.policy.hugging.model import HuggingModel
from headrace.policy.layout import hugging_face
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
    # Some fields have other names in transformers 4 and in servers: num_experts and num_local_experts.
    others = library.parsed(config.source).attribute_map.items()
    written = {name: written[ours] for name, ours in others if ours in written} | written
    text = json.dumps(written | hugging_face.older(written), indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    weights = {path for pattern in _WEIGHTS for path in source.rglob(pattern)}
    for path in sorted(set(source.rglob("*")) - weights):
        there = target / path.relative_to(source)
        if path.is_file() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
