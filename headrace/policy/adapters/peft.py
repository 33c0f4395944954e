"""An adapter as a PEFT folder: adapter_config.json and adapter_model.safetensors, for PEFT and servers that read it.

It belongs on the checkpoint that the run began with: the weights under it never changed.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from headrace.policy.adapters import low_rank
from headrace.policy.config import CheckpointError, PolicyConfig

_HEAD = "base_model.model."


def export(config: PolicyConfig, tensors: Mapping[str, Tensor], base: str, card: str, target: Path) -> int:
    """Write the adapter among a version's published tensors, and README.md. Returns the adapter's bytes.

    base: folder or name of the checkpoint that it belongs on. CheckpointError when there is no adapter or the target
    is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: expected a new folder")
    size = write(config, tensors, base, target)
    (target / "README.md").write_text(card, encoding="utf-8")
    return size


def write(config: PolicyConfig, tensors: Mapping[str, Tensor], base: str, target: Path) -> int:
    """The two files of `export`, in place of those that are there."""
    if config.adapter is None:
        raise CheckpointError("the policy has no adapter ([trainer.lora] rank was 0): export it without --as adapter")
    adapter = {_HEAD + name: value.contiguous() for name, value in tensors.items() if low_rank.is_published(name)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha,
        "target_modules": list(config.adapter.targets),
        "target_parameters": [f"experts.{name}" for name in config.adapter.parameters] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file(adapter, target / "adapter_model.safetensors", {"format": "pt"})
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return sum(value.nbytes for value in adapter.values())
