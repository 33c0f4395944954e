"""A published gpt-oss has its experts in MXFP4; the provider transformers trains them as numbers of the run's dtype."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.policy.config import CheckpointError
from headrace.policy.layout import hugging_face, refusing
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build
from tests.support import model_types


def test_experts_in_mxfp4_are_read_as_the_numbers_that_they_name(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = model_types.folder(tmp_path / "plain", "gpt_oss", hidden_size=64, intermediate_size=64)
    whole = dict(model_types.plain(folder).state_dict())
    packed: dict[str, Tensor] = {}
    for name in [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = whole[name].shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, blocks.shape[:-1], dtype=torch.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert packed
    four = tmp_path / "mxfp4"
    four.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    (four / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    left = {name: tensor for name, tensor in whole.items() if name + "_blocks" not in packed}
    save_file(left | packed, four / "model.safetensors", {"format": "pt"})

    config = hugging_face.read(four)
    refusing.refuse(config, four)
    model = build(config, Numerics(exact=False, reason="", fingerprint=""))
    model.load(four)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), whole[name.removeprefix("inner.")].float()), name
    # A run's own files, and what is exported, are not quantised.
    assert "quantization_config" not in hugging_face.as_json(config)

    (four / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quant_method 'fp8'"):
        hugging_face.read(four)


def test_a_published_gpt_oss_names_no_dtype_and_is_read_as_bfloat16(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "model", "gpt_oss")
    raw = json.loads((folder / "config.json").read_text())
    without = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(without | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert hugging_face.read(folder).dtype == "bfloat16"
