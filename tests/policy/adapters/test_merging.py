"""A PEFT folder as the start of a run: the merged checkpoint computes what base and adapter compute together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace.cli.main import main
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from tests.support import model_types

IDS = torch.arange(3, 43)
MLP, ATTENTION = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"
EMBEDDING, NORM = "model.embed_tokens", "model.norm"
SETTINGS = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6.0,
    "alpha_pattern": {"layers.1.self_attn.q_proj": 3.0},
    "target_modules": ["down_proj", "q_proj", "embed_tokens"],
    "modules_to_save": ["norm"],
}


def adapter(folder: Path, base: Path, **changes: Any) -> dict[str, Tensor]:
    """A PEFT folder; its q_proj has a rank and an alpha of its own."""
    torch.manual_seed(4)
    tensors = {
        f"{MLP}.lora_A.weight": torch.randn(4, 48) * 0.2,
        f"{MLP}.lora_B.weight": torch.randn(32, 4) * 0.2,
        f"{ATTENTION}.lora_A.weight": torch.randn(2, 32) * 0.2,
        f"{ATTENTION}.lora_B.weight": torch.randn(32, 2) * 0.2,
        f"{EMBEDDING}.base_layer.weight": model_types.plain(base).get_submodule(EMBEDDING).weight.data.clone(),
        f"{EMBEDDING}.lora_embedding_A": torch.randn(4, 96) * 0.2,
        f"{EMBEDDING}.lora_embedding_B": torch.randn(32, 4) * 0.2,
        f"{NORM}.weight": torch.randn(32),
    }
    folder.mkdir()
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    settings = SETTINGS | {"base_model_name_or_path": str(base)} | changes
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def beside(base: Path, tensors: dict[str, Tensor], root: bool) -> Tensor:
    """Logits of transformers with the adapter's products added to the products of its modules."""
    model = model_types.plain(base)
    model.get_submodule(NORM).weight.data = tensors[f"{NORM}.weight"]
    scales = {MLP: 6.0 / (2 if root else 4), ATTENTION: 3.0 / (2**0.5 if root else 2)}
    for name, scale in scales.items():
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        model.get_submodule(name).register_forward_hook(
            lambda module, given, out, a=a, b=b, scale=scale: out + scale * (given[0] @ a.T @ b.T)
        )
    a, b = tensors[f"{EMBEDDING}.lora_embedding_A"], tensors[f"{EMBEDDING}.lora_embedding_B"]
    of_embedding = 6.0 / (2 if root else 4)

    def embedded(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        return out + of_embedding * (a.T[given[0]] @ b.T)

    model.get_submodule(EMBEDDING).register_forward_hook(embedded)
    with torch.no_grad():
        logits: Tensor = model(IDS[None]).logits[0]
    return logits


@pytest.mark.parametrize("root", [False, True], ids=["alpha", "rslora"])
def test_a_merged_folder_computes_what_the_adapter_computes_beside_its_base(tmp_path: Path, root: bool) -> None:
    base = model_types.folder(tmp_path / "base", "seed_oss")  # its head is not the embedding
    tensors = adapter(tmp_path / "lora", base, use_rslora=root)
    (tmp_path / "lora" / "chat_template.jinja").write_text("x")
    assert main(["policy", "from-lora", str(tmp_path / "lora"), str(tmp_path / "out")]) == 0
    config = hugging_face.read(tmp_path / "out", "transformers")
    model = build(config, probe(config, exact=False))
    model.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(IDS, [40])), beside(base, tensors, root), rtol=0, atol=2e-5)
    assert (tmp_path / "out" / "chat_template.jinja").is_file() and (tmp_path / "out" / "notes" / "LICENSE").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "got 'DoRA'"),
        ({"peft_type": "IA3"}, "got 'IA3'"),
        ({"base_model_name_or_path": "org/name"}, "no folder org/name"),
    ],
)
def test_what_cannot_be_added_up_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = model_types.folder(tmp_path / "base", "llama")
    adapter(tmp_path / "lora", base, **changes)
    assert main(["policy", "from-lora", str(tmp_path / "lora"), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_tensor_that_changes_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = model_types.folder(tmp_path / "base", "llama")
    adapter(tmp_path / "lora", base)
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}, file)
    assert main(["policy", "from-lora", str(tmp_path / "lora"), str(tmp_path / "out")]) == 2
    assert "the first is model.layers.7.mlp.up_proj.lora_A.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
