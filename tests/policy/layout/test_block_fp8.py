"""Published checkpoints in eight bits with a factor per block, against transformers on the numbers that they mean."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.policy.config import CheckpointError
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.layout.pieces import Pieces
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from tests.support import model_types, tiny

KEPT = ("embed_tokens", "lm_head", "norm", ".gate.", "bias")
IDS = torch.arange(3, 43)


def pack(folder: Path, rows: int, columns: int) -> None:
    """Rewrite a folder's matrices as they are published: the largest number of a block becomes 448. A folder `plain`
    in it gets the numbers that this leaves. (transformers cannot read a matrix whose last block is not full.)"""
    shutil.copytree(folder, folder / "plain")
    numbers: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if any(kept in name for kept in KEPT):
            tensors[name] = numbers[name] = tensor
            continue
        down, across = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
        factors = torch.empty(down, across)
        packed, numbers[name] = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(tensor.shape)
        for row in range(down):
            for column in range(across):
                at = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                factors[row, column] = tensor[at].float().abs().max() / 448
                packed[at] = (tensor[at].float() / factors[row, column]).to(torch.float8_e4m3fn)
                numbers[name][at] = packed[at].float() * factors[row, column]
        tensors |= {name: packed, f"{name}_scale_inv": factors}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, folder / "plain" / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    raw["quantization_config"] = quantised | {"weight_block_size": [rows, columns]}
    (folder / "config.json").write_text(json.dumps(raw))


def reference(folder: Path) -> Tensor:
    """Logits of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(IDS[None]).logits[0]
    return logits


@pytest.mark.parametrize("block", [(128, 128), (16, 24)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_blocks_are_read_by_rows(tmp_path: Path, kind: str, block: tuple[int, int]) -> None:
    folder = model_types.folder(tmp_path / kind, kind)
    plain = load_file(folder / "model.safetensors")
    pack(folder, *block)
    wanted = reference(folder / "plain")
    for provider in ("native", "transformers") if kind != "minimax_m2" else ("transformers",):
        config = hugging_face.read(folder, provider)
        assert config.dtype == "float32" and not config.expert_format
        model = build(config, probe(config, exact=False))
        model.load(folder)
        with torch.no_grad():
            torch.testing.assert_close(model.logits(model(IDS, [len(IDS)])), wanted, rtol=0, atol=2e-5)
        state = model.state()
        assert set(plain) - {"lm_head.weight"} <= set(state) and not any(n.endswith("scale_inv") for n in state)
        pieces = Pieces(config, folder, {name: tuple(view.shape) for name, view in state.items()})
        for name, view in state.items():  # as the ranks read it: rows that begin within a block
            for first in range(0, len(view), 7):
                assert torch.equal(pieces.rows(name, first, len(view[first : first + 7])), view[first : first + 7])


def test_factors_that_are_missing_or_of_other_blocks_are_refused(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "qwen3", "qwen3")
    pack(folder, 16, 16)
    config = hugging_face.read(folder, "native")
    shapes = {name: tuple(view.shape) for name, view in build(config, tiny.numerics(config)).state().items()}
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({n: t for n, t in whole.items() if n != f"{name}_scale_inv"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv"):
        Pieces(config, folder, shapes)
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv"):
        checkpoint.load(folder)
    save_file(whole | {f"{name}_scale_inv": torch.ones(1, 1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected shape \[3, 2\], got \[1, 1\]"):
        Pieces(config, folder, shapes)
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]["weight_block_size"]
    for provider in ("native", "transformers"):
        (folder / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match="weight_block_size None"):
            hugging_face.read(folder, provider)
