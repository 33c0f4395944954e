"""A damaged embedding model is one sentence, wherever the damage is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.search.encoder import Encoder
from headrace.search.models import SearchModelError, read
from tests.support import embedding_model

TEXTS = ["def add(a, b): return a + b", "send mail to a user"]
QUERY, NORM, INNER = (
    f"encoder.layer.1.{name}.weight" for name in ("attention.self.query", "output.LayerNorm", "intermediate.dense")
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model.write(tmp_path_factory.mktemp("whole-bert"), TEXTS)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def config(**changes: Any) -> Callable[[Path], None]:
    """Sets keys of config.json; None removes one."""

    def damage(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text()) | changes
        keys = {key: value for key, value in keys.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(keys))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return damage


def content(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return damage


def tokenizer(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        keys = json.loads((folder / "tokenizer.json").read_text())
        change(keys)
        (folder / "tokenizer.json").write_text(json.dumps(keys))

    return damage


def folder_for(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


POOLING = "1_Pooling/config.json"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "list": (content("config.json", b"[1, 2]"), "Expected `object`, got `array`"),
    "no json": (content("config.json", b"{"), "config.json: "),
    "no utf-8": (content("config.json", b'{"model_type": "\xff"}'), "config.json: "),
    "nested": (content("config.json", b"[" * 100_000), "config.json: "),
    "no heads": (config(num_attention_heads=None), "missing required field `num_attention_heads`"),
    "zero heads": (config(num_attention_heads=0), "`int` >= 1"),
    "uneven heads": (config(num_attention_heads=5), "that num_attention_heads divides, got 64 and 5"),
    "layers as text": (config(num_hidden_layers="2"), "Expected `int`, got `str`"),
    "more layers": (config(num_hidden_layers=3), "has no tensor 'encoder.layer.2"),
    "huge": (config(hidden_size=1 << 40), "`int` <= 16777216"),
    "another width": (config(hidden_size=32), "has shape .*, expected any x 32"),
    "padding": (config(pad_token_id=10_000), "has token 10000, and the model has"),
    "pooling list": (content(POOLING, b"[]"), "1_Pooling/config.json: Expected `object`"),
    "pooling no json": (content(POOLING, b"\xff{"), "1_Pooling/config.json: "),
    "folder config": (folder_for("config.json"), r"lacks config\.json: expected a folder"),
    "folder weights": (folder_for("model.safetensors"), r"lacks model\.safetensors: expected a folder"),
    "weights": (content("model.safetensors", b"\xff" * 64), "cannot be read"),
    "query": (tensors(lambda state: state.pop(QUERY)), f"has no tensor '{QUERY}'"),
    "norm": (tensors(lambda state: state.pop(NORM)), f"has no tensor '{NORM}'"),
    "integers": (tensors(lambda state: state.update({NORM: torch.ones(64).int()})), f"has no tensor '{NORM}'"),
    "shape": (
        tensors(lambda state: state.update({QUERY: torch.zeros(64, 8)})),
        r"has shape \[64, 8\], expected 64 x 64",
    ),
    "axes": (tensors(lambda state: state.update({NORM: torch.zeros(8, 8)})), r"has shape \[8, 8\], expected 64"),
    "inner": (tensors(lambda state: state.update({INNER: torch.zeros(96, 64)})), r"has shape \[96, 64\], expected 128"),
    "not finite": (tensors(lambda state: state.update({NORM: torch.full((64,), torch.nan)})), "that is not finite"),
    "tokenizer": (content("tokenizer.json", b"\xff\xfe"), "cannot be read"),
    "vocabulary": (
        tokenizer(lambda keys: keys["model"]["vocab"].update({"more": 99_999})),
        "has token 99999, and the model has",
    ),
    "template": (
        tokenizer(lambda keys: keys["post_processor"]["special_tokens"]["[CLS]"].update({"ids": [88_888]})),
        "gives token 88888, and the model has",
    ),
    "no unknown": (tokenizer(lambda keys: keys["model"].update({"unk_token": "?"})), "cannot encode a text"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_in_a_sentence(damage: str, folder: Path) -> None:
    harm, sentence = DAMAGES[damage]
    harm(folder)
    with pytest.raises(SearchModelError, match=sentence) as refused:
        read(folder)
        Encoder(folder, 32)
    text = str(refused.value)
    assert str(folder) in text and "\n" not in text and len(text) < 600


def test_more_tokens_than_the_model_has_positions_are_refused(folder: Path) -> None:
    assert Encoder(folder, 64).embed(TEXTS).shape == (2, 64)
    with pytest.raises(SearchModelError, match=r"has 64 positions, too few for \[search\] tokens = 65"):
        Encoder(folder, 65)


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 5000, "a\0b", str(tmp_path / "absent")):
        with pytest.raises(SearchModelError, match=r"lacks config\.json"):
            read(Path(name))
